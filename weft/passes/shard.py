"""Turn a traced micro-step into the plain schedule of the chosen layout; later passes improve it.

Parameters enter through `parameters` (held whole) or `gather`/`await_gather` (right before their first use, released
after their last). Gradients are staged as soon as they exist, a bucket is reduced when its last one is staged, and
updated when at most two reductions are in flight and nothing will read its parameters again. Where parameters stay
gathered, the gathers for the next step follow the updates, in the layout's order.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from weft import graph as g
from weft.graph import PassReport, StepGraph, Variant, written_by
from weft.passes.aliases import aliases, derived_from, storages
from weft.state.layout import Bucket, Layout
from weft.trace.capture import Trace

IN_FLIGHT = 2  # reductions: one at a time leaves a network idle between messages


def shard(
    trace: Trace,
    layout: Layout,
    *,
    variant: Variant,
    accumulate: int = 1,
    clip: bool = False,
    whole_update: bool = False,
) -> StepGraph:
    """The base schedule of a trace under a layout, as one variant of the micro-step."""
    return _Emitter(trace, layout, variant, accumulate, clip, whole_update).emit()


def gather_order(trace: Trace, layout: Layout) -> tuple[tuple[int, str], ...]:
    """The order in which the sharded buckets are gathered: that of their uses in the trace that makes the layout."""
    emitter = _Emitter(trace, layout, "only", 1, False, False)
    emitter.order = None
    step = emitter.emit()
    order = emitter.issued_order
    forward = [item for item in order if item[1] == "forward"]
    backward = [item for item in order if item[1] == "backward"]
    # A bucket that only backward uses gets its one gather in forward order, so that every bucket has one there.
    first = {bucket for bucket, _ in forward}
    forward += [(bucket, "forward") for bucket, _ in backward if bucket not in first]
    backward = [item for item in backward if item[0] in first]
    if backward and backward[0][0] == _released_last_in_forward(step):
        backward = backward[1:]  # used last and first: giving it back in between saves nothing
    return (*forward, *backward)


def _released_last_in_forward(step: StepGraph) -> int | None:
    """The bucket that is released last before any bucket is gathered a second time."""
    gathered: set[int] = set()
    last = None
    for node in step.step_nodes():
        if node.target is g.release:
            last = g.bucket_of(node)
        elif node.target is g.gather:
            if g.bucket_of(node) in gathered:
                return last
            gathered.add(g.bucket_of(node))
    return None


def next_order(trace: Trace, layout: Layout) -> tuple[int, ...]:
    """The buckets that stay gathered, in the order in which the next forward needs them."""
    position = {node: index for index, node in enumerate(trace.graph.nodes)}
    first: dict[int, int] = {}
    for index, placeholder in enumerate(trace.parameters):
        if index not in layout.slot_of:
            continue
        bucket = layout.slot_of[index][0]
        uses = [position[user] for user in placeholder.users if user.op != "output"]
        first[bucket] = min(first.get(bucket, len(position)), *uses, len(position))
    kept = [b.index for b in layout.buckets if b.scatter and not b.sharded and b.trained and not b.dormant]
    return tuple(sorted(kept, key=lambda bucket: (first.get(bucket, len(position)), bucket)))


class _Emitter:
    """Copies a trace node by node into a new graph, putting step nodes in between."""

    def __init__(
        self, trace: Trace, layout: Layout, variant: Variant, accumulate: int, clip: bool, whole_update: bool
    ) -> None:
        self.trace, self.layout, self.variant = trace, layout, variant
        self.accumulate, self.clip, self.whole_update = accumulate, clip, whole_update
        self.graph = fx.Graph()
        self.run = self.graph.placeholder("run")
        self.env: dict[fx.Node, fx.Node] = {}
        self.backward_env: dict[fx.Node, fx.Node] = {}
        self.order: Sequence[tuple[int, str]] | None = layout.gather_order
        self.place_in_order = {item: place for place, item in enumerate(layout.gather_order)}
        self.issued_order: list[tuple[int, str]] = []
        self.awaited: dict[tuple[int, str], fx.Node] = {}
        self.resident: dict[int, fx.Node] = {}
        self.in_backward = False
        self.now = 0  # the position in the trace that emission has reached
        self.updates = variant in ("only", "last")

        self.bucket_of: dict[fx.Node, tuple[Bucket, int]] = {}
        for index, placeholder in enumerate(trace.parameters):
            if index in layout.slot_of:
                bucket, slot = layout.slot_of[index]
                self.bucket_of[placeholder] = (layout.buckets[bucket], slot)
        sharded = [node for node, (bucket, _) in self.bucket_of.items() if bucket.sharded]
        self.derived = derived_from(sharded, trace.graph, neutral=trace.buffers) if sharded else set()
        self.position = {node: index for index, node in enumerate(trace.graph.nodes)}
        self.last_use = self._last_uses()
        self.draws = Counter(node.meta["random_key"] for node in trace.graph.nodes if "random_key" in node.meta)
        self.kept: set[int] = set()

        # What is still to be staged, per bucket; reduced, awaited, updated.
        self.staging: dict[fx.Node, list[tuple[int, int]]] = {}
        self.missing: dict[int, set[int]] = {b.index: set() for b in layout.buckets if b.trained}
        self.to_stage: dict[int, int] = dict.fromkeys(self.missing, 0)
        for parameter, gradient in enumerate(trace.gradients):
            if parameter not in layout.slot_of:
                continue
            bucket, slot = layout.slot_of[parameter]
            if not layout.buckets[bucket].trained:
                continue
            if gradient is None:
                self.missing[bucket].add(slot)
            else:
                self.staging.setdefault(gradient, []).append((bucket, slot))
                self.to_stage[bucket] += 1
        self.results: dict[fx.Node, fx.Node] = {}
        self.cleared: set[int] = set()
        self.to_reduce = [] if variant == "evaluate" else list(layout.reduce_order)
        self.reduced: list[int] = []
        self.updates_at_end = clip or whole_update
        self.to_update: list[int] = []
        self.reach_known = False
        self.updated: set[int] = set()
        self.to_gather = list(layout.next_order)

    # ---- small helpers ----

    def add(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return g.add_step_node(self.graph, function, self.run, *args, by="shard")

    def _last_uses(self) -> dict[int, int]:
        """Per bucket, the position of the last trace node that reads the memory of one of its parameters."""
        last: dict[int, int] = {}
        for placeholder, (bucket, _) in self.bucket_of.items():
            readers = [user for alias in aliases(placeholder) for user in alias.users if user.op != "output"]
            for user in readers:
                last[bucket.index] = max(last.get(bucket.index, -1), self.position[user])
        return last

    # ---- parameters ----

    def parameter(self, placeholder: fx.Node) -> fx.Node:
        """A parameter's value, as the current phase may use it."""
        bucket, slot = self.bucket_of[placeholder]
        if not bucket.sharded:
            if bucket.index not in self.resident:
                source = g.await_gather if bucket.scatter else g.parameters
                self.resident[bucket.index] = self.add(source, bucket.index)
            env, source_node = self.env, self.resident[bucket.index]
        else:
            phase = self.phase_of(bucket.index)
            env = self.backward_env if phase == "backward" else self.env
            if placeholder not in env:
                source_node = self.awaited_gather(bucket.index, phase)
        if placeholder not in env:
            value = self.graph.create_node(
                "call_function", operator.getitem, (source_node, slot), name=placeholder.name
            )
            value.meta = {"val": placeholder.meta["val"], "parameter": placeholder.name}
            env[placeholder] = written_by(value, "shard")
        return env[placeholder]

    def phase_of(self, bucket: int) -> str:
        """Which of a bucket's gathers serves a use at this point."""
        if not self.in_backward:
            return "forward"
        if self.order is not None and (bucket, "backward") not in self.place_in_order:
            return "forward"  # kept since then
        return "backward"

    def awaited_gather(self, bucket: int, phase: str) -> fx.Node:
        """The full parameters of a sharded bucket; issues its gather and, before it, all earlier ones of the order."""
        item = (bucket, phase)
        if item not in self.awaited:
            if self.order is None:
                self.issue(item)
            else:
                for next_one in self.order[len(self.issued_order) : self.place_in_order[item] + 1]:
                    self.issue(next_one)
            self.awaited[item] = self.add(g.await_gather, bucket)
        return self.awaited[item]

    def issue(self, item: tuple[int, str]) -> None:
        self.issued_order.append(item)
        self.add(g.gather, item[0])

    def finish_phase(self, phase: str) -> None:
        """Issue and await the gathers that the order has in this phase and this trace does not use."""
        for item in self.order or ():
            if item[1] == phase and item not in self.awaited:
                self.awaited_gather(*item)

    # ---- nodes of the trace ----

    def value_of(self, node: fx.Node) -> fx.Node:
        if node in self.bucket_of:
            return self.parameter(node)
        if self.in_backward and node in self.derived and not node.meta.get("backward"):
            if node not in self.backward_env:
                # Computed from released parameters: compute it again instead of keeping it.
                arguments = {source: self.value_of(source) for source in node.all_input_nodes}
                copied = self.graph.node_copy(node, lambda n: arguments[n])
                self.backward_env[node] = written_by(copied, "shard")
            return self.backward_env[node]
        return self.env[node]

    def copy(self, node: fx.Node) -> None:
        arguments = {source: self.value_of(source) for source in node.all_input_nodes}
        key = node.meta.get("random_key")
        again = key is not None and key in self.kept
        if again:
            self.add(g.rewind_random, key)
        elif key is not None and self.draws[key] > 1:
            self.add(g.keep_random, key)
            self.kept.add(key)
        self.env[node] = self.graph.node_copy(node, lambda n: arguments[n])
        if again:
            self.add(g.resume_random)

    def emit(self) -> StepGraph:
        for index, node in enumerate(self.trace.parameters):
            if index not in self.layout.slot_of:
                self.env[node] = self.graph.node_copy(node)
        for node in (*self.trace.buffers, *self.trace.inputs):
            self.env[node] = self.graph.node_copy(node)
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                break
            if node.meta.get("backward") and not self.in_backward:
                self.enter_backward()
            self.copy(node)
            self.now = self.position[node]
            if node in self.staging:
                self.stage(node)
            self.reduce_full_buckets()
        self.close()
        step = StepGraph(
            graph=self.graph,
            constants=self.trace.constants,
            layout=self.layout,
            variant=self.variant,
            accumulate=self.accumulate,
            clip=self.clip,
            whole_update=self.whole_update,
        )
        release_after_last_use(step)
        step.reports.append(PassReport("shard", self.summary()))
        return step

    # ---- gradients ----

    def enter_backward(self) -> None:
        self.keep_results()
        self.finish_phase("forward")
        self.add(g.announce, self.results[self.trace.loss])
        self.in_backward = True
        self.stage_early_gradients()

    def stage_early_gradients(self) -> None:
        """Gradients that are inputs or were computed by forward: nothing in backward produces them."""
        for gradient in list(self.staging):
            if not gradient.meta.get("backward"):
                self.stage(gradient)

    def stage(self, gradient: fx.Node) -> None:
        value = self.value_of(gradient)
        for bucket, slot in self.staging.pop(gradient):
            self.clear(bucket)
            adds = self.variant in ("middle", "last") and not self.layout.buckets[bucket].reduce_often
            self.add(g.stage, bucket, slot, value, adds)
            self.to_stage[bucket] -= 1

    def clear(self, bucket: int) -> None:
        """Before a bucket is first staged into: zero what this program leaves out, unless it holds a sum already."""
        if bucket in self.cleared:
            return
        self.cleared.add(bucket)
        kept = self.variant in ("middle", "last") and not self.layout.buckets[bucket].reduce_often
        entry = self.layout.buckets[bucket]
        if not kept and (self.missing[bucket] or entry.gaps):
            self.add(g.clear, bucket, tuple(sorted(self.missing[bucket])))

    def reduce_full_buckets(self) -> None:
        """Reduce, in the layout's order, every bucket whose gradients are all staged."""
        while self.in_backward and self.to_reduce and not self.to_stage[self.to_reduce[0]]:
            entry = self.layout.buckets[self.to_reduce[0]]
            if entry.dormant:
                return  # these come at the very end
            self.reduce(self.to_reduce.pop(0))

    def reduce(self, bucket: int) -> None:
        self.clear(bucket)
        entry = self.layout.buckets[bucket]
        if not (self.updates or entry.reduce_often):
            return
        if entry.dormant:
            self.know_reach()
        self.finish_oldest()
        self.add(g.reduce, bucket)
        self.reduced.append(bucket)

    def finish_oldest(self) -> None:
        """Keep at most two reductions in flight, as far as later readers of the parameters allow."""
        while len(self.reduced) >= IN_FLIGHT:
            bucket = self.reduced[0]
            read_later = self.last_use.get(bucket, -1) > self.now and not self.layout.buckets[bucket].sharded
            if read_later and self.updates and not self.updates_at_end:
                return
            self.finish(self.reduced.pop(0))

    def finish(self, bucket: int) -> None:
        self.add(g.await_reduce, bucket)
        if self.updates_at_end:
            self.to_update.append(bucket)
        elif self.updates:
            self.update(bucket)

    def know_reach(self) -> None:
        if not self.reach_known:
            self.add(g.await_reach)
            self.reach_known = True

    def update(self, bucket: int) -> None:
        self.know_reach()
        entry = self.layout.buckets[bucket]
        resident = entry.scatter and not entry.sharded
        if resident and bucket not in self.resident:
            # Not used by this program: its gather may still be in flight.
            self.resident[bucket] = self.add(g.await_gather, bucket)
        if bucket in self.layout.offloaded:
            self.add(g.reload, bucket)
            self.add(g.await_reload, bucket)
        self.add(g.update, bucket)
        if bucket in self.layout.offloaded:
            self.add(g.offload, bucket)
        if resident:
            self.gather_for_next(bucket)

    def gather_for_next(self, bucket: int) -> None:
        """After an update: gather for the next step what the layout's order allows."""
        if bucket not in self.layout.next_order:
            self.add(g.gather, bucket)
            return
        self.updated.add(bucket)
        while self.to_gather and self.to_gather[0] in self.updated:
            self.add(g.gather, self.to_gather.pop(0))

    # ---- the end ----

    def close(self) -> None:
        if self.variant != "evaluate":
            if not self.in_backward:
                self.enter_backward()
            for gradient in list(self.staging):
                self.stage(gradient)
            self.reduce_full_buckets()
            self.finish_phase("backward")
            while self.to_reduce:
                self.reduce(self.to_reduce.pop(0))
            while self.reduced:
                self.finish(self.reduced.pop(0))
            if self.updates:
                self.close_step()
        else:
            self.keep_results()
            self.finish_phase("forward")
        self.outputs()

    def close_step(self) -> None:
        if self.clip:
            self.know_reach()
            self.add(g.norm)
            self.add(g.await_norm)
        if self.whole_update:
            self.know_reach()
            self.add(g.update_whole)
        elif self.clip:
            # What the next forward needs first is updated first: its gather follows at once.
            order = self.layout.next_order
            for bucket in sorted(self.to_update, key=lambda b: order.index(b) if b in order else len(order)):
                self.update(bucket)

    def keep_results(self) -> None:
        """At the end of forward: results must not lie in memory that the step changes, a parameter's or a buffer's."""
        changing = {s for node in (*self.trace.parameters, *self.trace.buffers) for s in storages(node)}
        for node in (self.trace.loss, *self.trace.extras, *self.trace.written):
            if isinstance(node, fx.Node):
                value = self.value_of(node)
                if storages(value) & changing:
                    value = self.graph.call_function(torch.ops.aten.clone.default, (value,))
                    written_by(value, "shard")
                self.results[node] = value

    def outputs(self) -> None:
        written = [(index, self.results[node]) for index, node in enumerate(self.trace.written) if node is not None]
        if written:
            self.add(g.write_buffers, tuple(index for index, _ in written), tuple(value for _, value in written))
        results = [self.trace.loss, *self.trace.extras]
        self.graph.output(tuple(self.results[v] if isinstance(v, fx.Node) else v for v in results))

    def summary(self) -> str:
        counts = Counter(node.target for node in self.graph.nodes)
        return (
            f"{len(self.layout.buckets)} buckets; per micro-step {counts[g.gather]} gathers, {counts[g.reduce]} "
            f"reductions, {counts[g.update] + counts[g.update_whole]} updates"
        )


def release_after_last_use(step: StepGraph) -> None:
    """Put a `release` after the last reader of every gather of a sharded bucket."""
    position = {node: index for index, node in enumerate(step.graph.nodes)}
    for node in list(step.graph.nodes):
        if node.target is not g.await_gather or not step.layout.buckets[g.bucket_of(node)].sharded:
            continue
        readers = [user for value in node.users for alias in aliases(value) for user in (alias, *alias.users)]
        last = max([node, *readers], key=lambda n: position[n])
        assert last.op != "output"
        with step.graph.inserting_after(last):
            g.add_step_node(step.graph, g.release, node.args[0], g.bucket_of(node), by="shard")
