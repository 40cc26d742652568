"""Offload what does not fit, and no more: settled before anything else spends memory.

Optimizer state is needed once a step, so it is what leaves. A plan that is over the budget gives fragments away, the
largest first, until it fits; the blocks through which they pass count. The passes that spend memory see what is left,
and none of them brings a fragment back: one round, no oscillation.
"""

from __future__ import annotations

from weft.graph import PassReport
from weft.passes.candidate import Candidate, Problem, evaluate
from weft.state.layout import Layout
from weft.units import human_bytes

TRIES = 6


def offload_floor(problem: Problem, base: Candidate) -> tuple[Candidate, PassReport]:
    """The plan with as few bytes offloaded as make it fit; with all of them, if it does not."""
    layout, elements = base.layout, problem.state_elements
    window = problem.options.offload_window
    possible = [b.index for b in layout.buckets if b.trained and not b.dormant]
    possible.sort(key=lambda bucket: (-layout.fragment_bytes(bucket, elements), bucket))
    excess = base.peak_bytes - problem.budget
    found, count = base, 0
    for number in range(TRIES):
        # More than the last time, whatever is thought to be freed; and all of them, before it is given up.
        counts = range(count + 1, len(possible) + 1) if number < TRIES - 1 else ()
        count = next((n for n in counts if _freed(layout, possible[:n], window, elements) >= excess), len(possible))
        chosen = layout.with_offload(possible[:count], window)
        found = evaluate(problem, chosen, f"{base.name}, {count} of {len(possible)} states offloaded")
        if found.peak_bytes <= problem.budget or count == len(possible):
            break
        excess += found.peak_bytes - problem.budget
    moved = sum(layout.fragment_bytes(bucket, elements) for bucket in found.layout.offloaded)
    return found, PassReport(
        "offload",
        f"{len(found.layout.offloaded)} of {len(possible)} fragments of optimizer state, {human_bytes(moved)}, are in "
        f"the next tier between updates: {human_bytes(base.peak_bytes)} would be needed otherwise",
    )


def _freed(layout: Layout, buckets: list[int], window: int, elements: float) -> int:
    before = layout.with_offload((), window).kept_bytes(elements)
    return before - layout.with_offload(buckets, window).kept_bytes(elements)
