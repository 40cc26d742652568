"""From a trace and a layout to a checked program: the passes in their order."""

from __future__ import annotations

from weft.graph import StepGraph, Variant
from weft.options import Options
from weft.passes.prefetch import prefetch
from weft.passes.shard import shard
from weft.passes.stage_in_place import stage_in_place
from weft.passes.validate import validate
from weft.state.layout import Layout
from weft.trace.capture import Trace

# In the order in which they run; each keeps the bits of the base schedule.
PASSES = {"prefetch": prefetch, "stage_in_place": stage_in_place}


def build_program(trace: Trace, layout: Layout, options: Options, variant: Variant, *, whole_update: bool) -> StepGraph:
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
            step.reports.append(rewrite(step))
    step.graph.lint()
    validate(step)
    return step
