"""Gather one bucket ahead: a gather starts before the wait for the one in front of it."""

from __future__ import annotations

from torch import fx

from weft import graph as g
from weft.graph import PassReport, StepGraph, bucket_of, written_by


def prefetch(step: StepGraph) -> PassReport:
    """Move every gather of a sharded bucket in front of the previous gather's wait, keeping their order."""
    awaits = [node for node in step.graph.nodes if node.target is g.await_gather and _sharded(step, node)]
    gathers = [node for node in step.graph.nodes if node.target is g.gather and _sharded(step, node)]
    moved = 0
    for previous, gather in zip(awaits, gathers[1:], strict=False):
        target = _no_earlier_than_release(previous, gather)
        if target is not gather:
            target.prepend(gather)
            written_by(gather, "prefetch")
            moved += 1
    return PassReport("prefetch", f"{moved} of {len(gathers)} gathers start one bucket ahead of their use")


def _sharded(step: StepGraph, node: fx.Node) -> bool:
    return step.layout.buckets[bucket_of(node)].sharded


def _no_earlier_than_release(earliest: fx.Node, gather: fx.Node) -> fx.Node:
    """The first node from `earliest` on before which the gather may stand: its own buffer must be free again."""
    target = gather
    node = gather.prev
    while node is not earliest.prev and node.op != "root":
        if node.target in (g.release, g.gather) and (bucket_of(node) == bucket_of(gather) or node.target is g.gather):
            break
        target = node
        node = node.prev
    return target if target.op != "placeholder" else gather
