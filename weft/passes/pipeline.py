"""From a trace and a layout to a checked program: the passes in their order."""

from __future__ import annotations

from collections.abc import Callable

from weft.graph import PassReport, StepGraph, Variant
from weft.options import Options
from weft.passes.context import PlanContext
from weft.passes.offload import overlap_copies
from weft.passes.prefetch import prefetch
from weft.passes.shard import shard
from weft.passes.stage_in_place import stage_in_place
from weft.passes.validate import validate
from weft.state.layout import Layout
from weft.trace.capture import Trace

# In the order in which they run; each keeps the bits of the base schedule.
PASSES: dict[str, Callable[..., PassReport]] = {
    "stage_in_place": stage_in_place,
    "prefetch": prefetch,
    "offload": overlap_copies,
}


def build_program(
    trace: Trace,
    layout: Layout,
    options: Options,
    variant: Variant,
    *,
    whole_update: bool,
    context: PlanContext,
) -> StepGraph:
    """One micro-step program, validated."""
    step = shard(
        trace,
        layout,
        variant=variant,
        accumulate=options.accumulate,
        clip=options.clip_norm is not None,
        whole_update=whole_update,
    )
    for name, rewrite in PASSES.items():
        if options.enabled(name):
            step.reports.append(rewrite(step, context))
    step.graph.lint()
    validate(step)
    return step
