"""Which bytes a program's own values take while each of its nodes runs.

Values are followed by the storage that they lie in, so that a view keeps what it views and costs nothing. A value is
made by its node and lives until the last node that uses it or anything in its memory has run: the code that fx
generates drops a name right after its last use, and PyTorch frees a storage with its last tensor. Not counted is what
lives elsewhere: parameters and staged gradients (in the arena or the buckets), the batch and buffers (the caller's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from weft._torch import size_hint, storage_key
from weft.graph import StepGraph, is_step_node
from weft.simulate.workspace import hidden_output_bytes, workspace_bytes

Curve = np.ndarray[tuple[int], np.dtype[np.int64]]


class Value:
    """One storage's life in a program."""

    def __init__(self, nbytes: int, born: int) -> None:
        self.nbytes = nbytes
        self.born = born
        self.last = born  # the position of the last node that uses it
        self.returned = False


def activation_curve(step: StepGraph) -> Curve:
    """Bytes of values alive while each node runs, and of what an op takes only while it runs."""
    return add_up(spans(step), len(step.graph.nodes))


def spans(step: StepGraph) -> Iterator[tuple[int, int, int]]:
    """(bytes, first position, last position) of all values and workspaces, in the order in which they come."""
    waiting = iter(values(step))
    value = next(waiting, None)
    for position, node in enumerate(step.graph.nodes):
        workspace = workspace_bytes(node)
        if workspace:
            yield workspace, position, position
        while value is not None and value.born == position:
            yield value.nbytes, value.born, value.last
            value = next(waiting, None)


def returned_bytes(step: StepGraph) -> int:
    """What the program's results take: the caller holds them when it has run."""
    return sum(value.nbytes for value in values(step) if value.returned)


def values(step: StepGraph) -> list[Value]:
    """The storages that a program's ops make, in the order in which they make them."""
    made: list[Value] = []
    # Per node, the storages its value lies in. A node that is computed again carries the fake tensor of the first time,
    # so a storage's key alone does not say which of the two is meant: a value has an older one's memory only where it
    # is made from it. None stands for memory that is not the program's own.
    held: dict[fx.Node, dict[int, Value | None]] = {}
    for position, node in enumerate(step.graph.nodes):
        inputs: dict[int, Value | None] = {}
        for source in node.all_input_nodes:
            for key, value in held[source].items():
                inputs[key] = value
                if value is not None:
                    value.last = position
                    value.returned = value.returned or node.op == "output"
        elsewhere = node.op in ("placeholder", "get_attr") or "parameter" in node.meta
        mine: dict[int, Value | None] = {}
        for tensor in _tensors(node):
            key = storage_key(tensor)
            if elsewhere:
                mine[key] = None
            elif key in inputs:
                mine[key] = inputs[key]
            elif key not in mine:
                mine[key] = Value(size_hint(tensor.untyped_storage().nbytes()), position)
                made.append(mine[key])  # type: ignore[arg-type]  # the line above made it
        hidden = hidden_output_bytes(node)
        if hidden:
            # Memory that the kernel's outputs hold, and of which the trace's fake ones know nothing.
            key = -position - 1
            mine[key] = Value(hidden, position)
            made.append(mine[key])  # type: ignore[arg-type]
        held[node] = mine
    return made


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors of what a node makes; step nodes and ops that write to a given place make nothing."""
    if is_step_node(node) or "out" in node.kwargs:
        return
    value: Any = node.meta.get("val")
    if value is None and node.op == "call_function" and node.target is torch.ops.aten.clone.default:
        value = node.args[0].meta.get("val")  # type: ignore[union-attr]  # a result that the passes had to copy
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def add_up(spans: Iterable[tuple[int, int, int]], length: int) -> Curve:
    """The sum by position of (bytes, first position, last position)."""
    changes = np.zeros(length + 1, dtype=np.int64)
    for nbytes, first, last in spans:
        changes[first] += nbytes
        changes[last + 1] -= nbytes
    return np.cumsum(changes[:-1])
