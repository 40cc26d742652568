"""Check a step graph against the rules that every schedule must keep, whichever passes made it.

The rules are about the node vocabulary alone, so a pass that is added later is checked by the same code. `check`
returns every violation as a sentence; `validate` raises if there is one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from weft import graph as g
from weft.graph import StepGraph, bucket_of, is_step_node
from weft.passes.aliases import aliases
from weft.state.layout import Bucket
from weft.trace.functional import is_mutating


class InvalidProgram(AssertionError):
    """A pass broke a rule of the step graph: a defect of weft, not of the user's model."""


def validate(step: StepGraph) -> None:
    problems = check(step)
    if problems:
        raise InvalidProgram("the step graph breaks its rules:\n  " + "\n  ".join(problems))


def check(step: StepGraph) -> list[str]:
    """Every rule that the graph breaks, in words."""
    return _Checker(step).run()


class _Checker:
    """Walks the graph once, keeping the state that the executor would be in."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.layout = step.layout
        self.problems: list[str] = []
        self.position = {node: index for index, node in enumerate(step.graph.nodes)}
        self.gathering: set[int] = set()
        self.gathered: dict[int, fx.Node] = {}
        # What the seam leaves: whole parameters, their gathers perhaps in flight.
        self.whole = {b.index for b in self.layout.buckets if not b.sharded}
        self.maybe_in_flight = {b.index for b in self.layout.buckets if b.scatter and not b.sharded}
        self.staged: dict[int, set[int]] = {}
        self.reducing: list[int] = []
        self.reduced: set[int] = set()
        self.updated: set[int] = set()
        self.reloading: set[int] = set()
        self.in_memory: set[int] = set()
        self.offloaded: list[int] = []
        self.norm: str | None = None
        self.announced = False
        self.reach_known = False
        self.updated_whole = False
        self.reduce_sequence: list[int] = []
        self.gather_sequence: list[int] = []
        self.kept: set[int] = set()
        self.rewound = False
        self.last_key = -1
        self.released_values: dict[fx.Node, int] = {}
        self.current_values: dict[int, set[fx.Node]] = {}

    def fail(self, node: fx.Node, text: str) -> None:
        self.problems.append(f"{node.name}: {text}")

    def run(self) -> list[str]:
        for node in self.step.graph.nodes:
            self.check_reads(node)
            if is_step_node(node):
                getattr(self, f"on_{node.target.__name__}")(node)
            elif node.op == "call_function":
                self.on_compute(node)
        self.at_end()
        return self.problems

    # ---- parameters ----

    def check_reads(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.released_values:
                self.fail(node, f"reads {source.name}, in bucket {self.released_values[source]}, after its release")

    def on_parameters(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if bucket.sharded or bucket.scatter:
            self.fail(node, f"bucket {bucket.index} is not held whole without a gather")
        self.remember(node)

    def on_gather(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if bucket.index in self.gathering or bucket.index in self.gathered:
            self.fail(node, f"bucket {bucket.index} is gathered already")
        if bucket.sharded:
            self.gather_sequence.append(bucket.index)
        else:
            if bucket.index not in self.updated:
                self.fail(node, f"bucket {bucket.index} is gathered again without an update before it")
            self.forbid_values(bucket.index)
        self.gathering.add(bucket.index)

    def on_await_gather(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if bucket.sharded:
            if bucket.index not in self.gathering:
                self.fail(node, f"waits for bucket {bucket.index}, which is not being gathered")
            self.gathered[bucket.index] = node
            self.gathering.discard(bucket.index)
        elif bucket.index in self.maybe_in_flight:
            self.maybe_in_flight.discard(bucket.index)
        else:
            self.fail(node, f"bucket {bucket.index} has been awaited before")
        self.remember(node)

    def remember(self, node: fx.Node) -> None:
        values = {alias for user in node.users for alias in aliases(user)} | {node}
        self.current_values.setdefault(bucket_of(node), set()).update(values)

    def forbid_values(self, bucket: int) -> None:
        for value in self.current_values.pop(bucket, ()):
            self.released_values[value] = bucket

    def on_release(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if self.gathered.pop(bucket.index, None) is None:
            self.fail(node, f"releases bucket {bucket.index}, which is not gathered")
        self.forbid_values(bucket.index)

    # ---- gradients ----

    def on_clear(self, node: fx.Node) -> None:
        bucket, missing = self.bucket(node), set(node.args[2])  # type: ignore[arg-type]
        if missing & self.staged.get(bucket.index, set()):
            self.fail(node, f"zeroes gradients of bucket {bucket.index} that are staged already")
        self.stage_slots(node, bucket, missing)

    def on_staged(self, node: fx.Node) -> None:
        users = list(node.users)
        if len(users) != 1 or users[0].kwargs.get("out") is not node:
            self.fail(node, "is a place to write a gradient to, and has other users than one out= argument")

    def on_stage(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        self.stage_slots(node, bucket, {node.args[2]})  # type: ignore[arg-type]
        adds = self.step.variant in ("middle", "last") and not bucket.reduce_often
        if node.args[4] is not adds:
            self.fail(node, f"{'adds to' if node.args[4] else 'overwrites'} the gradient of an earlier micro-step")

    def stage_slots(self, node: fx.Node, bucket: Bucket, slots: Iterable[int]) -> None:
        if bucket.index in self.reduce_sequence:
            self.fail(node, f"stages into bucket {bucket.index} after its reduction began")
        known = self.staged.setdefault(bucket.index, set())
        for slot in slots:
            if slot in known:
                self.fail(node, f"stages slot {slot} of bucket {bucket.index} twice")
            known.add(slot)

    def on_compute(self, node: fx.Node) -> None:
        out = node.kwargs.get("out")
        if isinstance(out, fx.Node) and out.target is g.staged:
            self.stage_slots(node, self.bucket(out), {out.args[2]})  # type: ignore[arg-type]
        elif node.target is operator.getitem and self.not_a_parameter(node.args[0]):
            self.fail(node, "takes parameters from a node that does not wait for them")
        elif is_mutating(node) and not self.writes_to_batch(node):
            self.fail(node, "changes a tensor in place")
        key = node.meta.get("random_key")
        if key is not None and not self.rewound:
            if key <= self.last_key:
                self.fail(node, "draws random numbers out of order")
            self.last_key = key

    @staticmethod
    def not_a_parameter(source: Any) -> bool:
        return is_step_node(source) and source.target not in (g.parameters, g.await_gather)

    @staticmethod
    def writes_to_batch(node: fx.Node) -> bool:
        """A change of the user's batch, which eager would make too, written back at the end."""
        target = node.args[0]
        return isinstance(target, fx.Node) and target.op == "placeholder"

    def on_reduce(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        complete = self.staged.get(bucket.index, set()) >= set(range(len(bucket.slots)))
        keeps_sum = self.step.variant in ("middle", "last") and not bucket.reduce_often
        if not complete and not keeps_sum:
            self.fail(node, f"reduces bucket {bucket.index} before all its gradients are staged")
        if not (self.step.updates or bucket.reduce_often):
            self.fail(node, f"reduces bucket {bucket.index} in the middle of an accumulation")
        if bucket.dormant and not self.reach_known:
            self.fail(node, f"bucket {bucket.index} may be unreached everywhere, and nobody has asked")
        self.reduce_sequence.append(bucket.index)
        self.reducing.append(bucket.index)

    def on_await_reduce(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        if bucket.index not in self.reducing:
            self.fail(node, f"waits for a reduction of bucket {bucket.index} that was not started")
            return
        self.reducing.remove(bucket.index)
        self.reduced.add(bucket.index)

    # ---- updates ----

    def on_announce(self, node: fx.Node) -> None:
        self.announced = True

    def on_await_reach(self, node: fx.Node) -> None:
        if not self.announced:
            self.fail(node, "waits for what the ranks reach before this one has told")
        self.reach_known = True

    def on_norm(self, node: fx.Node) -> None:
        missing = set(self.layout.reduce_order) - self.reduced
        if missing:
            self.fail(node, f"takes the norm before buckets {sorted(missing)} are reduced")
        self.norm = "started"

    def on_await_norm(self, node: fx.Node) -> None:
        if self.norm != "started":
            self.fail(node, "waits for a norm that was not started")
        self.norm = "known"

    def before_update(self, node: fx.Node) -> None:
        if not self.step.updates:
            self.fail(node, "updates in a program that does not end a step")
        if self.step.clip and self.norm != "known":
            self.fail(node, "updates before the gradient norm is known")
        if not self.reach_known:
            self.fail(node, "updates before it is known which parameters were reached")

    def on_update(self, node: fx.Node) -> None:
        bucket = self.bucket(node)
        self.before_update(node)
        if bucket.index not in self.reduced:
            self.fail(node, f"updates bucket {bucket.index} before its reduction is done")
        if bucket.index in self.updated:
            self.fail(node, f"updates bucket {bucket.index} twice")
        if bucket.index in self.layout.offloaded and bucket.index not in self.in_memory:
            self.fail(node, f"updates bucket {bucket.index} without its optimizer state in memory")
        if not bucket.sharded:
            if bucket.index in self.maybe_in_flight:
                self.fail(node, f"updates bucket {bucket.index} while its gather may be in flight")
            self.forbid_values(bucket.index)
        self.updated.add(bucket.index)

    def on_update_whole(self, node: fx.Node) -> None:
        self.before_update(node)
        missing = set(self.layout.reduce_order) - self.reduced
        if missing:
            self.fail(node, f"updates before buckets {sorted(missing)} are reduced")
        for bucket in self.layout.reduce_order:
            self.forbid_values(bucket)
        self.updated_whole = True

    # ---- optimizer state in the next tier ----

    def on_reload(self, node: fx.Node) -> None:
        bucket = self.bucket(node).index
        if bucket not in self.layout.offloaded:
            self.fail(node, f"reloads bucket {bucket}, which is not offloaded")
        if bucket in self.reloading or bucket in self.in_memory or bucket in self.offloaded:
            self.fail(node, f"reloads bucket {bucket} twice")
        if not self.step.updates:
            self.fail(node, "reloads optimizer state in a program that does not end a step")
        self.reloading.add(bucket)
        used = self.reloading | self.in_memory
        if len(used) > self.layout.offload_window:
            self.fail(node, f"has buckets {sorted(used)} in memory; the window is {self.layout.offload_window}")

    def on_await_reload(self, node: fx.Node) -> None:
        bucket = self.bucket(node).index
        if bucket not in self.reloading:
            self.fail(node, f"waits for bucket {bucket}, which is not being reloaded")
        self.reloading.discard(bucket)
        self.in_memory.add(bucket)

    def on_offload(self, node: fx.Node) -> None:
        bucket = self.bucket(node).index
        if bucket not in self.in_memory:
            self.fail(node, f"offloads bucket {bucket}, which is not in memory")
        if bucket not in self.updated:
            self.fail(node, f"offloads bucket {bucket} before its update")
        self.in_memory.discard(bucket)
        self.offloaded.append(bucket)

    # ---- the rest ----

    def on_keep_random(self, node: fx.Node) -> None:
        self.kept.add(node.args[1])  # type: ignore[arg-type]

    def on_rewind_random(self, node: fx.Node) -> None:
        if node.args[1] not in self.kept or self.rewound:
            self.fail(node, "rewinds the generator to a position that was not kept")
        self.rewound = True

    def on_resume_random(self, node: fx.Node) -> None:
        if not self.rewound:
            self.fail(node, "resumes a generator that was not rewound")
        self.rewound = False

    def on_write_buffers(self, node: fx.Node) -> None:
        if self.step.updates and not self.reach_known:
            self.fail(node, "writes buffers before it is known whether all ranks have a loss")

    def at_end(self) -> None:
        layout, step = self.layout, self.step
        evaluates = step.variant == "evaluate"
        expected = [b for b, phase in layout.gather_order if not (evaluates and phase == "backward")]
        if self.gather_sequence != expected:
            self.problems.append(f"gathers run in the order {self.gather_sequence}, the layout's is {expected}")
        reduces = [b for b in layout.reduce_order if step.updates or layout.buckets[b].reduce_often]
        expected = [] if evaluates else reduces
        if self.reduce_sequence != expected:
            self.problems.append(f"reductions run in the order {self.reduce_sequence}, the layout's is {expected}")
        if self.reducing:
            self.problems.append(f"nobody waits for the reductions of buckets {sorted(self.reducing)}")
        if self.gathered or (self.gathering & {b.index for b in layout.buckets if b.sharded}):
            left = sorted(set(self.gathered) | {b for b in self.gathering if layout.buckets[b].sharded})
            self.problems.append(f"the gathered memory of buckets {left} is not released")
        if step.updates and not step.whole_update and self.updated != set(layout.reduce_order):
            self.problems.append(f"buckets {sorted(set(layout.reduce_order) - self.updated)} are not updated")
        if step.updates and step.whole_update and not self.updated_whole:
            self.problems.append("nothing is updated")
        after = self.gathering | (set() if step.updates else self.maybe_in_flight)
        resident = {b.index for b in layout.buckets if b.scatter and not b.sharded and b.trained}
        if step.updates and not step.whole_update and after != resident:
            self.problems.append(f"after the step buckets {sorted(after)} are being gathered, of {sorted(resident)}")
        if self.reloading or self.in_memory:
            left = sorted(self.reloading | self.in_memory)
            self.problems.append(f"the optimizer state of buckets {left} is left in memory")
        out = list(layout.offloaded) if step.updates else []
        if sorted(self.offloaded) != out:
            self.problems.append(f"the optimizer state of buckets {sorted(self.offloaded)} is offloaded, not of {out}")
        if self.rewound:
            self.problems.append("the generator is left rewound")

    def bucket(self, node: fx.Node) -> Bucket:
        return self.layout.buckets[bucket_of(node)]
