"""Let the op that computes a gradient write it into the staged buffer, where it has a variant that can."""

from __future__ import annotations

import torch
from torch import fx

from weft import graph as g
from weft.graph import PassReport, StepGraph, written_by
from weft.passes.aliases import storages
from weft.passes.context import PlanContext

aten = torch.ops.aten

# Ops whose out= variant computes in place of the result; the generated variants of other ops compute and then copy.
OUT_VARIANTS = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
    aten.mul.Tensor: aten.mul.out,
}


def stage_in_place(step: StepGraph, context: PlanContext) -> PassReport:
    """Replace `stage` by an out= call of the gradient's producer where nothing else reads the result."""
    stages = [node for node in step.graph.nodes if node.target is g.stage]
    replaced = sum(_replace(step, node) for node in stages)
    return PassReport("stage_in_place", f"{replaced} of {len(stages)} gradients are written where they are reduced")


def _replace(step: StepGraph, stage: fx.Node) -> bool:
    run, bucket_index, slot_index, gradient, adds = stage.args
    assert isinstance(gradient, fx.Node)
    if adds:
        return False
    bucket = step.layout.buckets[bucket_index]  # type: ignore[index]
    slot = bucket.slots[slot_index]  # type: ignore[index]
    producer = _producer(gradient)
    if producer is None:
        return False
    made, wanted = producer.meta["val"], gradient.meta["val"]
    if not all(isinstance(size, int) for size in (*made.shape, *made.stride())):
        return False  # a size that the batch decides
    same_memory = (
        wanted.stride() == slot.stride and wanted.storage_offset() == 0 == made.storage_offset()
    ) and made.numel() == wanted.numel()
    if not same_memory or made.dtype != bucket.reduce or not _dense(made):
        return False
    with step.graph.inserting_before(producer):
        shape, stride = tuple(made.shape), tuple(made.stride())
        place = g.add_step_node(step.graph, g.staged, run, bucket_index, slot_index, shape, stride, by="stage_in_place")
        out = OUT_VARIANTS[producer.target]  # type: ignore[index]
        written = step.graph.call_function(out, producer.args, {**producer.kwargs, "out": place})
    written_by(written, "stage_in_place")
    # The chain from the producer to the stage is views alone, and nothing else reads it.
    step.graph.erase_node(stage)
    node = gradient
    while True:
        source = node.args[0] if node is not producer else None
        step.graph.erase_node(node)
        if source is None:
            return True
        assert isinstance(source, fx.Node)
        node = source


def _producer(gradient: fx.Node) -> fx.Node | None:
    """The op with an out= variant at the start of the chain of views that ends in the gradient."""
    node = gradient
    while True:
        if node.op != "call_function" or len(node.users) != 1:
            return None
        if node.target in OUT_VARIANTS:
            return node
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.all_input_nodes != [source]:
            return None
        if not storages(node) or storages(node) != storages(source):
            return None
        node = source


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers its elements without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
