"""What a node's arguments and results look like, without any data: dtype, shape and stride of every tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from weft import graph as g
from weft._torch import op_schema, size_hint, storage_key


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's geometry; open sizes are those of the batch that was traced."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory: more than `numel` with gaps, fewer if it is expanded."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that reading all of it touches."""
        return min(self.numel, self.extent) * self.dtype.itemsize


def spec_of(value: torch.Tensor) -> TensorSpec:
    shape, stride = tuple(value.shape), tuple(value.stride())
    for size in (*shape, *stride):
        if type(size) is not int:
            shape = tuple(size_hint(one) for one in shape)
            stride = tuple(size_hint(one) for one in stride)
            break
    return TensorSpec(value.dtype, shape, stride, value.device)


def value_of(node: fx.Node) -> Any:
    """A node's value with specs in place of tensors; None if nothing is known of it."""
    if node.target is g.staged:
        return _staged_spec(node)
    value = node.meta.get("val")
    if value is None:
        out = node.kwargs.get("out") if node.op == "call_function" else None
        return value_of(out) if isinstance(out, fx.Node) else None
    return specs_in(value)


def specs_in(value: Any) -> Any:
    """The same value, with specs in place of tensors and numbers in place of open sizes."""
    if isinstance(value, torch.Tensor):
        return spec_of(value) if value.layout is torch.strided else str(value.layout)
    if isinstance(value, (list, tuple)):
        return [specs_in(item) for item in value]
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size_hint(value)
    return value


def _staged_spec(node: fx.Node) -> TensorSpec | None:
    """A gradient's place: its dtype is that of the op that writes it."""
    shape, stride = (tuple(node.args[position]) for position in (3, 4))  # type: ignore[arg-type]
    for user in node.users:
        if user.op == "call_function" and user.kwargs.get("out") is node:
            inputs = [value for source in user.all_input_nodes if source is not node for value in tensors_of(source)]
            if inputs:
                dtype = user.kwargs.get("dtype")
                if not isinstance(dtype, torch.dtype):
                    dtype = inputs[0].dtype
                    for other in inputs[1:]:
                        dtype = torch.promote_types(dtype, other.dtype)
                return TensorSpec(dtype, shape, stride, inputs[0].device)
    return None


def flat_specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_specs(item)


def tensors_of(node: fx.Node) -> list[TensorSpec]:
    """The tensors that a node returns."""
    return list(flat_specs(value_of(node)))


def storages_in(value: Any) -> set[int]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    tensors = (item for item in values if isinstance(item, torch.Tensor))
    return {storage_key(item) for item in tensors if item.layout is torch.strided}


def is_view(node: fx.Node) -> bool:
    """Whether all that an op returns lies in its arguments' memory, and it writes nothing."""
    schema = op_schema(node.target)
    if schema is None or schema.is_mutable:
        return False
    mine = storages_in(node.meta.get("val"))
    if not mine:
        return False
    return mine <= {key for source in node.all_input_nodes for key in storages_in(source.meta.get("val"))}


def is_op(node: fx.Node) -> bool:
    """Whether a node computes something that can be timed: not a step node, a placeholder or a collective."""
    if node.op != "call_function" or g.is_step_node(node):
        return False
    namespace = getattr(node.target, "namespace", "")
    return not namespace.startswith(("c10d", "_c10d", "symm_mem"))
