"""The step graph: traced ATen ops plus the nodes below, the vocabulary of passes, validator, executor and report.

Node order is launch order. Each function here only hands on to the `run` it is given, which the executor supplies; a
graph can be read, moved about and checked without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from weft.state.layout import Layout

# The place of a micro-step in its step; "evaluate" is forward alone.
Variant = Literal["only", "first", "middle", "last", "evaluate"]


class Run(Protocol):
    """What the executor does for each node."""

    def parameters(self, bucket: int) -> Sequence[torch.Tensor]: ...
    def gather(self, bucket: int) -> None: ...
    def await_gather(self, bucket: int) -> Sequence[torch.Tensor]: ...
    def release(self, bucket: int) -> None: ...
    def clear(self, bucket: int, slots: Sequence[int]) -> None: ...
    def staged(self, bucket: int, slot: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor: ...
    def stage(self, bucket: int, slot: int, gradient: torch.Tensor, add: bool) -> None: ...
    def reduce(self, bucket: int) -> None: ...
    def await_reduce(self, bucket: int) -> None: ...
    def announce(self, loss: torch.Tensor) -> None: ...
    def await_reach(self) -> None: ...
    def norm(self) -> None: ...
    def await_norm(self) -> None: ...
    def update(self, bucket: int) -> None: ...
    def update_whole(self) -> None: ...
    def reload(self, bucket: int) -> None: ...
    def await_reload(self, bucket: int) -> None: ...
    def offload(self, bucket: int) -> None: ...
    def keep_random(self, key: int) -> None: ...
    def rewind_random(self, key: int) -> None: ...
    def resume_random(self) -> None: ...
    def write_buffers(self, indices: Sequence[int], values: Sequence[torch.Tensor]) -> None: ...


def parameters(run: Run, bucket: int) -> Sequence[torch.Tensor]:
    """The parameters of a bucket that every rank holds whole."""
    return run.parameters(bucket)


def gather(run: Run, bucket: int) -> None:
    """Start the all-gather of a bucket."""
    run.gather(bucket)


def await_gather(run: Run, bucket: int) -> Sequence[torch.Tensor]:
    """A bucket's full parameters, once its gather (in flight since the last program, perhaps) is done."""
    return run.await_gather(bucket)


def release(run: Run, bucket: int) -> None:
    """Give a bucket's gathered memory back."""
    run.release(bucket)


def clear(run: Run, bucket: int, slots: Sequence[int]) -> None:
    """Zero the padding of a bucket's staged gradients, and the slots that this program does not stage."""
    run.clear(bucket, slots)


def staged(run: Run, bucket: int, slot: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A gradient's place in the staged buffer, in the shape in which its producer writes it."""
    return run.staged(bucket, slot, shape, stride)


def stage(run: Run, bucket: int, slot: int, gradient: torch.Tensor, add: bool) -> None:
    """Copy (or add) a gradient into the bucket's staged buffer."""
    run.stage(bucket, slot, gradient, add)


def reduce(run: Run, bucket: int) -> None:
    """Start the reduction of a bucket's staged gradients."""
    run.reduce(bucket)


def await_reduce(run: Run, bucket: int) -> None:
    """Finish a bucket's reduction."""
    run.await_reduce(bucket)


def announce(run: Run, loss: torch.Tensor) -> None:
    """Forward is done: tell the others which parameters are reached here and (on CPUs) whether the loss is a number."""
    run.announce(loss)


def await_reach(run: Run) -> None:
    """Learn which parameters any rank reached in this step, and whether all losses are numbers."""
    run.await_reach()


def norm(run: Run) -> None:
    """Start the global gradient norm."""
    run.norm()


def await_norm(run: Run) -> None:
    """Finish the global gradient norm."""
    run.await_norm()


def update(run: Run, bucket: int) -> None:
    """The optimizer's update of what this rank owns of a bucket."""
    run.update(bucket)


def update_whole(run: Run) -> None:
    """The user's optimizer on all parameters at once: for those that need whole tensors."""
    run.update_whole()


def reload(run: Run, bucket: int) -> None:
    """Start to bring a bucket's optimizer state back from the next tier of memory."""
    run.reload(bucket)


def await_reload(run: Run, bucket: int) -> None:
    """Have a bucket's optimizer state in memory."""
    run.await_reload(bucket)


def offload(run: Run, bucket: int) -> None:
    """Start to write a bucket's optimizer state out; the next reload that needs its memory comes after that."""
    run.offload(bucket)


def keep_random(run: Run, key: int) -> None:
    """Remember the generator's position: a recomputed op will draw from here again."""
    run.keep_random(key)


def rewind_random(run: Run, key: int) -> None:
    """Go back to a remembered position."""
    run.rewind_random(key)


def resume_random(run: Run) -> None:
    """Return to where the generator was before the rewind."""
    run.resume_random()


def write_buffers(run: Run, indices: Sequence[int], values: Sequence[torch.Tensor]) -> None:
    """Write the buffers that forward changed back into the model."""
    run.write_buffers(indices, values)


STEP_NODES: frozenset[Callable[..., Any]] = frozenset(
    (
        parameters,
        gather,
        await_gather,
        release,
        clear,
        staged,
        stage,
        reduce,
        await_reduce,
        announce,
        await_reach,
        norm,
        await_norm,
        update,
        update_whole,
        reload,
        await_reload,
        offload,
        keep_random,
        rewind_random,
        resume_random,
        write_buffers,
    )
)
for _function in STEP_NODES:
    fx.node.has_side_effect(_function)


@dataclass(frozen=True)
class PassReport:
    """What a pass did, for `plan.explain()`; `gain` is in seconds of the step, as simulated."""

    name: str
    summary: str
    gain: float | None = None

    def describe(self) -> str:
        gain = "" if self.gain is None else f" (predicted gain {1e3 * self.gain:.1f} ms)"
        return f"{self.name}: {self.summary}{gain}"


@dataclass(frozen=True)
class Policy:
    """How communication is placed among compute (see passes/arrange.py).

    Attributes:
        ahead: how early a gather starts, in multiples of the time that it and those behind it take.
        in_flight: reductions whose wait is not placed yet; one more forces the oldest's.
        backlog: seconds of messages on the wire above which no gather for the next step is added to them.
        urgent: how many of the buckets that the next forward needs first are gathered whatever the backlog.
        room: bytes for buffers that come and go, as far as that can be chosen.
    """

    ahead: float
    in_flight: int
    backlog: float
    urgent: int
    room: float


@dataclass
class StepGraph:
    """One micro-step's program."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    layout: Layout
    variant: Variant
    accumulate: int
    clip: bool
    whole_update: bool  # the optimizer needs whole tensors: one update at the end
    reports: list[PassReport] = field(default_factory=list)
    policy: Policy | None = None  # None: as `shard` placed it

    @property
    def updates(self) -> bool:
        """Whether this program ends a step."""
        return self.variant in ("only", "last")

    @property
    def updates_at_end(self) -> bool:
        """Whether every update waits for all reductions: for the norm, or because there is only one."""
        return self.clip or self.whole_update

    def step_nodes(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if is_step_node(node)]


def add_step_node(graph: fx.Graph, function: Callable[..., Any], run: Any, *args: Any, by: str) -> fx.Node:
    """Insert a step node, named after its bucket, that the pass `by` put there."""
    numbers = [str(arg) for arg in args[:2] if isinstance(arg, int)]
    name = "_".join([function.__name__, *numbers])
    return written_by(graph.create_node("call_function", function, (run, *args), name=name), by)


def is_step_node(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in STEP_NODES


def bucket_of(node: fx.Node) -> int:
    """The bucket that a step node is about."""
    return node.args[1]  # type: ignore[return-value]


def written_by(node: fx.Node, name: str) -> fx.Node:
    """Mark a node with the pass that put it where it is; `plan.code()` shows it."""
    node.meta["pass"] = name
    return node
