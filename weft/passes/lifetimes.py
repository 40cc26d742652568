"""Where a program's transient buffers begin and end, and so where in the arena they may lie."""

from __future__ import annotations

from weft import graph as g
from weft.graph import StepGraph, bucket_of
from weft.state.arena import Lease, Placement, place
from weft.state.layout import Bucket

STAGING = (g.clear, g.staged, g.stage)


def placement(step: StepGraph, *, receives: bool) -> Placement:
    """Offsets of the transient buffers. `receives`: a reduce-scatter needs a second buffer as large as the staged one."""
    return place(leases(step, receives=receives))


def result_kind(step: StepGraph, bucket: Bucket, *, receives: bool) -> str:
    """The buffer in which a bucket's reduced gradients wait for their update."""
    if bucket.scatter and step.accumulate > 1 and bucket.reduce_often:
        return "sum"  # of the micro-steps' slices, outside the arena
    if bucket.scatter and step.updates_at_end:
        return "slice"  # all buckets wait, so each keeps no more than its slice
    return "received" if bucket.scatter and receives else "staged"


def leases(step: StepGraph, *, receives: bool) -> list[Lease]:
    """One lease a buffer: ("gathered" | "staged" | "received" | "slice", bucket)."""
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    results: dict[int, str] = {}
    for position, node in enumerate(step.graph.nodes):
        if not g.is_step_node(node):
            continue
        if node.target in (g.norm, g.await_norm, g.update_whole):
            for index, kind in results.items():
                _extend(spans, (kind, index), position)
            continue
        if node.target not in (g.gather, g.release, g.reduce, g.await_reduce, g.update, *STAGING):
            continue
        bucket = step.layout.buckets[bucket_of(node)]
        if node.target is g.gather:
            if bucket.sharded:
                spans.setdefault(("gathered", bucket.index), []).append((position, len(step.graph.nodes)))
        elif node.target is g.release:
            start, _ = spans[("gathered", bucket.index)].pop()
            spans[("gathered", bucket.index)].append((start, position))
        elif node.target is g.update:
            _extend(spans, (results[bucket.index], bucket.index), position)
        else:
            _extend(spans, ("staged", bucket.index), position)
            if node.target is not g.reduce and node.target is not g.await_reduce:
                continue
            if bucket.scatter and receives:
                _extend(spans, ("received", bucket.index), position)
            if node.target is g.await_reduce:
                results[bucket.index] = result_kind(step, bucket, receives=receives)
                _extend(spans, (results[bucket.index], bucket.index), position)
    result = []
    for (kind, index), found in spans.items():
        bucket = step.layout.buckets[index]
        whole_sum = kind == "staged" and step.accumulate > 1 and not bucket.reduce_often
        if bucket.dormant or kind == "sum" or whole_sum:
            continue  # these live outside the arena
        dtype = bucket.compute if kind == "gathered" else bucket.reduce
        size = bucket.slice_numel if kind == "slice" else bucket.numel
        result.append(Lease((kind, index), size * dtype.itemsize, tuple(found)))
    return result


def _extend(spans: dict[tuple[str, int], list[tuple[int, int]]], key: tuple[str, int], position: int) -> None:
    start = spans[key][0][0] if key in spans else position
    spans[key] = [(start, position)]
