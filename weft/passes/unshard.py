"""Spend memory that is left on parameters that stay gathered, where it saves most waiting per byte.

A sharded bucket is gathered twice in every micro-step, a resident one once a step, after its update. (Keeping it from
forward to backward alone, or through an accumulation, takes no less memory at the peak, since a resident bucket's own
slice lies in it, and saves less: residence is the one choice.) Gradients that come together once a step, from a whole
sum, are the other thing that memory buys where steps accumulate. Choices are taken in the order of what they save per
byte, and those that do not fit are passed over, not stopped at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.graph import PassReport
from weft.passes.candidate import Candidate, Problem, evaluate
from weft.state.layout import Layout, Traits

TRIES = 4  # plans of which the memory is found to be too much, before fewer choices are taken at once


@dataclass(frozen=True)
class Choice:
    """Something to spend memory on, for one bucket."""

    bucket: int
    what: str  # "resident", "reduced once"
    nbytes: int
    saves: float  # seconds a step

    @property
    def worth(self) -> float:
        return self.saves / max(self.nbytes, 1)


def unshard(problem: Problem, base: Candidate) -> tuple[Candidate, PassReport]:
    """The base plan with what fits of parameters kept whole; the base itself if that is not faster."""
    # The base has spent memory on gathering ahead, which parameters that stay need no more.
    lean = evaluate(replace(problem, thrifty=True), base.layout, base.name)
    spare = problem.budget - lean.peak_bytes
    choices = _choices(problem, base)
    if spare <= 0 or not choices:
        return base, PassReport("unshard", "there is no memory left to keep parameters whole")
    best = base
    for _ in range(TRIES):
        taken = _fill(choices, spare)
        if not taken:
            break
        found = evaluate(problem, _apply(problem, base.layout, taken), f"{base.name}, unsharded in part")
        if found.peak_bytes <= problem.budget and found.seconds < base.seconds:
            best = found
            break
        if found.peak_bytes <= problem.budget:
            # Less memory for gathering ahead cost more than these save: fewer of them.
            spare -= max(sum(choice.nbytes for choice in taken) // 2, 1)
            continue
        spare -= found.peak_bytes - problem.budget
    if best is base:
        return base, PassReport("unshard", "keeping parameters whole would not be faster")
    resident = [choice for choice in taken if choice.what == "resident"]
    once = [choice for choice in taken if choice.what == "reduced once"]
    summary = (
        f"{len(resident)} of {len(base.layout.buckets)} buckets stay gathered, "
        f"{len(once)} are reduced once a step; {1e3 * base.seconds:.1f} -> {1e3 * best.seconds:.1f} ms, for "
        f"{(best.peak_bytes - base.peak_bytes) / 2**20:.1f} MiB more"
    )
    return best, PassReport("unshard", summary, base.seconds - best.seconds)


def _choices(problem: Problem, base: Candidate) -> list[Choice]:
    """What may be bought, best first; a bucket's waits in the simulation count for it, its messages' times else."""
    assert problem.costs is not None
    assert base.timeline is not None
    layout, links = base.layout, problem.costs.links
    micro_batches = problem.options.accumulate
    waits: dict[int, float] = {}
    for name, seconds in base.timeline.waits.items():
        parts = name.split("_")
        if name.startswith("await_gather") and parts[2].isdigit():
            waits[int(parts[2])] = waits.get(int(parts[2]), 0.0) + seconds
    backward = {bucket for bucket, phase in layout.gather_order if phase == "backward"}
    found = []
    for bucket in layout.buckets:
        if bucket.dormant or not bucket.sharded:
            continue
        gathers = micro_batches * (2 if bucket.index in backward else 1)
        service = links.gather.service(bucket.bytes(bucket.compute))
        whole = replace(bucket, sharded=False)
        nbytes = whole.kept_bytes(problem.state_elements) - bucket.kept_bytes(problem.state_elements)
        stays = 1 if bucket.trained else 0
        waited = waits.get(bucket.index, 0.0)
        found.append(Choice(bucket.index, "resident", nbytes, (gathers - stays) * service + waited))
        # Summing over micro-batches before summing over ranks rounds otherwise: only where modes are open anyway.
        if problem.options.mode == "auto" and bucket.trained and bucket.reduce_often and micro_batches > 1:
            numel = bucket.numel - bucket.slice_numel
            saves = (micro_batches - 1) * links.reduce_scatter.service(bucket.bytes(bucket.reduce))
            found.append(Choice(bucket.index, "reduced once", numel * bucket.reduce.itemsize, saves))
    return sorted(found, key=lambda choice: (-choice.worth, choice.bucket))


def _fill(choices: list[Choice], spare: float) -> list[Choice]:
    taken = []
    for choice in choices:
        if choice.nbytes <= spare:
            taken.append(choice)
            spare -= choice.nbytes
    return taken


def _apply(problem: Problem, layout: Layout, taken: list[Choice]) -> Layout:
    traits: dict[int, Traits] = {}
    for choice in taken:
        bucket = layout.buckets[choice.bucket]
        now = traits.get(choice.bucket, Traits(bucket.scatter, bucket.reduce_often, bucket.sharded))
        if choice.what == "resident":
            now = replace(now, sharded=False)
        elif choice.what == "reduced once":
            now = replace(now, reduce_often=False)
        traits[choice.bucket] = now
    return problem.with_traits(layout, traits)
