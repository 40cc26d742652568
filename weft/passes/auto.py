"""Choose how a step is laid out: all modes and residencies compete under the budget, in simulation."""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph import PassReport
from weft.measure.tiers import TierTimes
from weft.passes.candidate import Candidate, Problem, evaluate
from weft.passes.floor import offload_floor
from weft.passes.unshard import unshard
from weft.state.layout import Layout, Traits

SHARES = (0.15, 0.3, 0.45, 0.6, 0.8)  # of the buckets whose update is replicated, in mixtures
WORTH = 5e-3  # of the step: a plan must be better by more to be taken over a simpler one


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen, what it was chosen from, and what the passes that choose did."""

    best: Candidate
    others: tuple[Candidate, ...]
    reports: tuple[PassReport, ...]
    tier: TierTimes | None  # as measured, where something is offloaded


class TooLittle(ValueError):
    """No plan fits the budget."""


def auto(problem: Problem) -> Choice:
    """The fastest plan that fits, of the mode asked for or of all."""
    mode = problem.options.mode
    if problem.options.fragments:
        problem = problem.timing_copies()
    seen: list[Candidate] = []
    reports: list[PassReport] = []

    def look(layout: Layout, name: str) -> Candidate:
        seen.append(evaluate(problem, layout, name))
        return seen[-1]

    if mode == "auto":
        if problem.world == 1 or problem.whole_update:
            look(problem.layout("replicate"), "replicate")
        else:
            for name in ("replicate", "zero1", *(["zero2"] if problem.options.accumulate > 1 else [])):
                look(problem.layout(name), name)
            if problem.costs is not None and seen[0].peak_bytes <= problem.budget:
                _mixtures(problem, seen, look)
            if not any(_fits(problem, c) for c in seen):
                look(problem.layout("zero3"), "zero3")
    else:
        look(problem.layout(mode), mode)
    best = _fastest(problem, seen)
    floored: list[PassReport] = []
    if _may_offload(problem):
        # What does not fit competes with its state in the next tier, unless something that fits is as fast already.
        least = best.seconds * (1 - WORTH) if _fits(problem, best) else float("inf")
        faster = [c for c in seen if not _fits(problem, c) and (c.seconds < least or least == float("inf"))]
        problem = problem.timing_copies() if faster else problem
        for candidate in faster:
            found, report = offload_floor(problem, candidate)
            seen.append(found)
            if _fastest(problem, seen) is found:
                floored = [report]
        best = _fastest(problem, seen)
    reports += floored if best.layout.offloaded else []
    sharded = any(bucket.sharded for bucket in best.layout.buckets)
    spends = not problem.thrifty and problem.costs is not None and problem.options.enabled("unshard")
    if sharded and spends and _fits(problem, best):
        found, report = unshard(problem, best)
        reports.append(report)
        if found is not best:
            seen.append(found)
            best = found
    if not _fits(problem, best) and (mode == "auto" or problem.options.memory_given):
        raise TooLittle(_too_little(problem, min(seen, key=lambda c: c.peak_bytes)))
    tier = problem.costs.tier if problem.costs is not None and best.layout.offloaded else None
    return Choice(best, tuple(c for c in seen if c is not best), tuple(reports), tier)


def _mixtures(problem: Problem, seen: list[Candidate], look: object) -> None:
    """Some buckets' gradients come together on every rank, while there is time in backward: fewer gathers are left.

    What is reduced early in backward is what the next forward needs last; with clipping, where no update and so no
    gather can start before the norm is known, this is what fills the wire until then.
    """
    assert callable(look)
    plain = next(c for c in seen if c.name == "zero1")
    order = [b for b in plain.layout.reduce_order if not plain.layout.buckets[b].dormant]
    best = plain
    for share in SHARES:
        count = round(share * len(order))
        if not 0 < count < len(order):
            continue
        whole = {bucket: Traits(scatter=False, reduce_often=False, sharded=False) for bucket in order[:count]}
        found = look(problem.with_traits(plain.layout, whole), f"zero1, {count} buckets replicated")
        if found.seconds > best.seconds * (1 + 4 * WORTH):
            break
        best = min(best, found, key=lambda c: c.seconds)


def _may_offload(problem: Problem) -> bool:
    options = problem.options
    asked = options.mode == "auto" or options.memory_given
    return (
        asked and options.offload != "off" and options.enabled("offload") and not options.fragments
    ) and not problem.whole_update


def _fits(problem: Problem, candidate: Candidate) -> bool:
    return candidate.peak_bytes <= problem.budget


def _fastest(problem: Problem, seen: list[Candidate]) -> Candidate:
    """The fastest that fits, the first of those that are about as fast; what needs least memory, if none fits."""
    fitting = [c for c in seen if _fits(problem, c)]
    if not fitting:
        return min(seen, key=lambda c: c.peak_bytes)
    if problem.costs is None:
        return fitting[0]
    fastest = min(c.seconds for c in fitting)
    return min(
        (c for c in fitting if c.seconds <= fastest * (1 + WORTH)),
        key=lambda c: ("," in c.name, c.peak_bytes),
    )


def _too_little(problem: Problem, least: Candidate) -> str:
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in least.memory.parts.items() if nbytes)
    return (
        f"memory={problem.budget} bytes a rank is too little: {least.name} needs the least, {least.peak_bytes} bytes "
        f"at its peak ({parts}). Give memory={least.peak_bytes} or more, more ranks, or smaller micro-batches"
    )
