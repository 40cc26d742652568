"""A program as passes and the simulator see it: compute in its fixed order, and the step nodes that stand between.

No pass changes the order of the traced ops, so a program is a list of compute nodes and, for every step node that
communicates, waits or updates, the number of compute nodes before it. Moving an event is changing that number; `apply`
puts the graph's nodes in the order that results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from weft import graph as g
from weft.graph import StepGraph, bucket_of, is_step_node, written_by

# Step nodes that are moved and timed as events; others (stage, staged, clear, ...) stay with the compute they serve.
EVENTS: frozenset[Callable[..., Any]] = frozenset(
    (
        g.gather,
        g.await_gather,
        g.release,
        g.reduce,
        g.await_reduce,
        g.announce,
        g.await_reach,
        g.norm,
        g.await_norm,
        g.update,
        g.update_whole,
        g.reload,
        g.await_reload,
        g.offload,
        g.write_buffers,
    )
)
WITHOUT_BUCKET = frozenset((g.announce, g.await_reach, g.norm, g.await_norm, g.update_whole, g.write_buffers))


@dataclass(slots=True)
class Event:
    """A step node and how many compute nodes stand before it."""

    node: fx.Node
    kind: str
    bucket: int  # -1: about no bucket
    at: int
    phase: str = ""  # of a gather and its wait: "forward", "backward", or "next" for the next step


class Schedule:
    """The compute nodes of a program with their times, and its events in order."""

    def __init__(self, step: StepGraph, seconds: Callable[[fx.Node], float]) -> None:
        self.step = step
        self.placeholders: list[fx.Node] = []
        self.compute: list[fx.Node] = []
        self.events: list[Event] = []
        self.output: fx.Node | None = None
        phases = _Phases(step)
        for node in step.graph.nodes:
            if node.op == "placeholder":
                self.placeholders.append(node)
            elif node.op == "output":
                self.output = node
            elif is_step_node(node) and node.target in EVENTS:
                bucket = -1 if node.target in WITHOUT_BUCKET else bucket_of(node)
                self.events.append(
                    Event(node, node.target.__name__, bucket, len(self.compute), phases.of(node, bucket))
                )
            else:
                self.compute.append(node)
        # elapsed[i]: seconds of compute before compute node i.
        self.elapsed = [0.0, *accumulate(seconds(node) for node in self.compute)]

    def apply(self, events: Sequence[Event], by: str) -> int:
        """Put the graph's nodes in the order of these events; returns how many moved. `by` is the pass's name."""
        before = {event.node: event.at for event in self.events}
        moved = 0
        assert self.output is not None
        anchors = [*self.compute, self.output]
        for event in events:
            # In front of the same anchor, events end up in the order of the list.
            anchors[event.at].prepend(event.node)
            if before[event.node] != event.at:
                written_by(event.node, by)
                moved += 1
        self.events = list(events)
        return moved


class _Phases:
    """Which of its gathers in a program a gather or wait belongs to."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.gathers: dict[int, int] = {}

    def of(self, node: fx.Node, bucket: int) -> str:
        if node.target not in (g.gather, g.await_gather, g.release):
            return ""
        if not self.step.layout.buckets[bucket].sharded:
            return "next" if node.target is g.gather else "forward"
        if node.target is g.gather:
            self.gathers[bucket] = self.gathers.get(bucket, 0) + 1
        return "backward" if self.gathers.get(bucket, 0) > 1 else "forward"
