"""Where a program's transient buffers begin and end, and so where in the arena they may lie."""

from __future__ import annotations

import torch

from weft import graph as g
from weft.graph import StepGraph, bucket_of
from weft.state.arena import Lease, Placement, place
from weft.state.layout import Bucket

STAGING = (g.clear, g.staged, g.stage)
GATHERED = ("gathered", "regathered")  # a bucket may be gathered twice in a program


def placement(step: StepGraph, *, receives: bool) -> Placement:
    """Offsets of the transient buffers. `receives`: a reduce-scatter needs a second buffer, for others' parts."""
    return place(leases(step, receives=receives))


def result_kind(step: StepGraph, bucket: Bucket, *, receives: bool) -> str:
    """The buffer in which a bucket's reduced gradients wait for their update."""
    if bucket.scatter and step.accumulate > 1 and bucket.reduce_often:
        return "sum"  # of the micro-steps' slices, outside the arena
    if bucket.scatter and step.updates_at_end:
        return "slice"  # all buckets wait, so each keeps no more than its slice
    return "received" if bucket.scatter and receives else "staged"


def leases(step: StepGraph, *, receives: bool) -> list[Lease]:
    """One lease a buffer: ("gathered" | "regathered" | "staged" | "received" | "slice", bucket)."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    results: dict[int, str] = {}

    def use(kind: str, bucket: int, position: int) -> None:
        spans[kind, bucket] = (spans.get((kind, bucket), (position, 0))[0], position)

    for position, node in enumerate(step.graph.nodes):
        if not g.is_step_node(node):
            continue
        if node.target in (g.norm, g.await_norm, g.update_whole):
            for index, kind in results.items():
                use(kind, index, position)
            continue
        if node.target not in (g.gather, g.release, g.reduce, g.await_reduce, g.update, *STAGING):
            continue
        bucket = step.layout.buckets[bucket_of(node)]
        if node.target is g.gather:
            if bucket.sharded:
                use("regathered" if ("gathered", bucket.index) in spans else "gathered", bucket.index, position)
        elif node.target is g.release:
            use("regathered" if ("regathered", bucket.index) in spans else "gathered", bucket.index, position)
        elif node.target is g.update:
            use(results[bucket.index], bucket.index, position)
        else:
            use("staged", bucket.index, position)
            if node.target is not g.reduce and node.target is not g.await_reduce:
                continue
            if bucket.scatter and receives:
                use("received", bucket.index, position)
            if node.target is g.await_reduce:
                results[bucket.index] = result_kind(step, bucket, receives=receives)
                use(results[bucket.index], bucket.index, position)
    result = []
    for (kind, index), (start, stop) in spans.items():
        bucket = step.layout.buckets[index]
        whole_sum = kind == "staged" and step.accumulate > 1 and not bucket.reduce_often
        if bucket.dormant or kind == "sum" or whole_sum:
            continue  # these live outside the arena
        nbytes = buffer_numel(kind, bucket) * buffer_dtype(kind, bucket).itemsize
        result.append(Lease((kind, index), nbytes, start, stop))
    return result


def buffer_dtype(kind: str, bucket: Bucket) -> torch.dtype:
    return bucket.compute if kind in GATHERED else bucket.reduce


def buffer_numel(kind: str, bucket: Bucket) -> int:
    """Elements of a transient buffer of a bucket."""
    return {"slice": bucket.slice_numel, "received": received_numel(bucket)}.get(kind, bucket.numel)


def received_numel(bucket: Bucket) -> int:
    """What the other ranks send of this rank's slice."""
    return bucket.numel - bucket.slice_numel
