"""Tracing with some sizes left open, and the guards that say for which batches the graph is right.

Every open size becomes a symbol of its own. What the model's Python (and PyTorch's kernels' choice) decides by a size
while it is traced is recorded as a guard; a later batch that passes all guards would have been traced to the same
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft._torch import SYMPY_FUNCTIONS, FakeTensorMode, ShapeEnv, new_size, print_size

OpenDims = tuple[frozenset[int], ...]  # per tensor of a batch, the dimensions that are left open


def geometry(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """All sizes and strides of a batch, one behind the other: what guards look at."""
    found: list[int] = []
    for tensor in tensors:
        found += tensor.shape
        found += tensor.stride()
    return tuple(found)


class OpenSizes:
    """The fake tensors of a batch with open sizes, and later their guards."""

    def __init__(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor], dims: OpenDims) -> None:
        self.environment: ShapeEnv = mode.shape_env  # type: ignore[assignment]  # `fake_mode(symbolic=True)` made it
        self.geometry: list[Any] = []
        self.sizes: dict[tuple[int, int], Any] = {}
        self.tensors: list[torch.Tensor] = []
        for number, (tensor, open_dims) in enumerate(zip(tensors, dims, strict=True)):
            self.tensors.append(self._fake(mode, number, tensor, open_dims))

    def _fake(self, mode: FakeTensorMode, number: int, tensor: torch.Tensor, dims: frozenset[int]) -> torch.Tensor:
        shape: list[Any] = list(tensor.shape)
        for dim in dims:
            shape[dim] = new_size(self.environment, shape[dim], f"batch_{number}.size({dim})")
            self.sizes[number, dim] = shape[dim]
        stride: list[Any] = list(tensor.stride())
        expected, now = 1, 1  # what the next stride is if dimensions lie densely: as an expression, and its value here
        for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
            if now == tensor.stride(dim):
                stride[dim] = expected
            elif dims and tensor.stride(dim) > 1:  # a slice of something larger, whose size varies as well
                stride[dim] = new_size(self.environment, tensor.stride(dim), f"batch_{number}.stride({dim})")
            expected, now = stride[dim] * shape[dim], tensor.stride(dim) * tensor.size(dim)
        self.geometry += [*shape, *stride]
        with mode:
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)

    def guards(self) -> Guards:
        """What the trace took for granted."""
        fixed = [place for place, size in self.sizes.items() if size.node.expr.is_number]
        return Guards(self.environment, self.geometry, fixed)


class Guards:
    """A predicate over the geometry of a batch; `fixed` are the open sizes that the model fixed to one value."""

    def __init__(self, environment: ShapeEnv, geometry: Sequence[Any], fixed: Sequence[tuple[int, int]]) -> None:
        self.fixed = fixed
        expressions = [getattr(value, "node", value) for value in geometry]
        expressions = [getattr(value, "_expr", value) for value in expressions]  # as they were before any guard
        symbols: dict[Any, int] = {}
        for position, expression in enumerate(expressions):
            if getattr(expression, "is_symbol", False):
                symbols.setdefault(expression, position)
        conditions = [
            f"v[{position}] == {print_size(expression)}"
            for position, expression in enumerate(expressions)
            if symbols.get(expression) != position
        ]
        for symbol in symbols:
            bounds = environment.var_to_range[symbol]
            conditions.append(f"{print_size(bounds.lower)} <= {symbol}")
            if bounds.upper.is_Integer:  # infinity is not
                conditions.append(f"{symbol} <= {print_size(bounds.upper)}")
        for guard in environment.guards:
            unknown = guard.expr.free_symbols - symbols.keys()
            if unknown:
                raise ValueError(f"{guard.expr} is taken for granted, and the batch does not tell {unknown}")
            conditions.append(print_size(guard.expr))
        self.text = " and ".join(dict.fromkeys(conditions)) or "True"
        names = ", ".join(map(str, symbols))
        values = ", ".join(f"v[{position}]" for position in symbols.values())
        self._accepts = eval(f"lambda v: (lambda {names}: {self.text})({values})", dict(SYMPY_FUNCTIONS))

    def accept(self, geometry: tuple[int, ...]) -> bool:
        return bool(self._accepts(geometry))
