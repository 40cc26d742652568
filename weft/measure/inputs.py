"""Arguments of its own for an op that is timed alone: the geometry of the real ones, random values, valid indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from weft._torch import op_schema
from weft.measure.values import TensorSpec, value_of

aten = torch.ops.aten
Bound = Mapping[str, Any]  # an op's arguments by name, specs in place of tensors

BLOCK = 1 << 16  # random numbers repeat after as many
RUN = 64  # booleans come in runs: masks are causal or padding, and kernels branch on them


@dataclass(frozen=True)
class Memory:
    """The memory under a made tensor, as 64-bit words: to touch it, whatever lies in it."""

    words: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.words.numel() * 8

    def touch(self) -> None:
        """Write what is there again: the op that produced it would have left it in the cache like this."""
        self.words.bitwise_or_(0)


@dataclass
class Call:
    """An op with its arguments."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memory: dict[fx.Node, Memory]

    def __call__(self) -> Any:
        return self.target(*self.args, **self.kwargs)


# ---- which integers are valid ----


def _rows(of: str, dim: str | int | None = 0) -> Callable[[Bound], int]:
    """Indices into a dimension of another argument; `dim` may be an argument itself."""

    def limit(bound: Bound) -> int:
        shape = bound[of].shape
        if not shape:
            return 1
        return shape[bound[dim] if isinstance(dim, str) else dim]

    return limit


def _number(of: str) -> Callable[[Bound], int]:
    return lambda bound: bound[of]


def _classes(bound: Bound) -> int:
    """Of a loss over (N, C, ...) or (C)."""
    shape = bound["self"].shape
    return shape[1] if len(shape) > 1 else shape[0]


def _plane(dims: int) -> Callable[[Bound], int]:
    """Positions in a pooled image, for each of which a window's maximum was found."""

    def limit(bound: Bound) -> int:
        size = 1
        for length in bound["self"].shape[-dims:]:
            size *= length
        return size

    return limit


# By op and argument: integers below this are valid. All others get zeros, which are valid as indices of anything.
LIMITS: dict[tuple[Any, str], Callable[[Bound], int]] = {
    (aten.embedding, "indices"): _rows("weight"),
    (aten.embedding_dense_backward, "indices"): _number("num_weights"),
    (aten._embedding_bag, "indices"): _rows("weight"),
    (aten._embedding_bag_forward_only, "indices"): _rows("weight"),
    (aten._embedding_bag_dense_backward, "indices"): _number("num_weights"),
    (aten.gather, "index"): _rows("self", "dim"),
    (aten.scatter, "index"): _rows("self", "dim"),
    (aten.scatter_add, "index"): _rows("self", "dim"),
    (aten.scatter_reduce, "index"): _rows("self", "dim"),
    (aten.index_select, "index"): _rows("self", "dim"),
    (aten.index_add, "index"): _rows("self", "dim"),
    (aten.index_copy, "index"): _rows("self", "dim"),
    (aten.index_fill, "index"): _rows("self", "dim"),
    (aten.nll_loss_forward, "target"): _classes,
    (aten.nll_loss_backward, "target"): _classes,
    (aten.nll_loss2d_forward, "target"): _classes,
    (aten.nll_loss2d_backward, "target"): _classes,
    (aten.multi_margin_loss, "target"): _classes,
    (aten.multi_margin_loss_backward, "target"): _classes,
    (aten.max_pool2d_with_indices_backward, "indices"): _plane(2),
    (aten.max_pool3d_with_indices_backward, "indices"): _plane(3),
    (aten.adaptive_max_pool2d_backward, "indices"): _plane(2),
    (aten.adaptive_max_pool3d_backward, "indices"): _plane(3),
    (aten.fractional_max_pool2d_backward, "indices"): _plane(2),
}
# Here a position's index lies near it, as it does in a pooled image; anything else would be slower than it is.
ASCENDING = {packet for packet, name in LIMITS if name == "indices" and "pool" in str(packet)}
# A tensor argument that lists one index tensor a dimension, None where all of a dimension is taken.
ADVANCED = {aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put, aten._index_put_impl}


def bind(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by name, with specs in place of tensors and defaults filled in."""
    schema = op_schema(node.target)
    assert schema is not None
    bound: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            value: Any = node.args[position]
        else:
            value = node.kwargs.get(argument.name, argument.default_value)
        bound[argument.name] = fx.node.map_arg(value, value_of)
    return bound


def index_limits(node: fx.Node) -> dict[fx.Node, int]:
    """For the integer tensors of an op that are known to be indices: the first number that is not valid."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    schema = op_schema(node.target)
    assert schema is not None
    limits: dict[fx.Node, int] = {}
    bound: dict[str, Any] | None = None
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        rule = LIMITS.get((packet, argument.name))
        if rule is not None and isinstance(value, fx.Node):
            bound = bound or bind(node)
            limits[value] = rule(bound)
        elif packet in ADVANCED and argument.name == "indices" and isinstance(value, (list, tuple)):
            bound = bound or bind(node)
            limits |= _advanced(bound["self"].shape, value)
    return limits


def _advanced(shape: tuple[int, ...], indices: Any) -> dict[fx.Node, int]:
    limits: dict[fx.Node, int] = {}
    dim = 0
    for index in indices:
        spec = value_of(index) if isinstance(index, fx.Node) else None
        if isinstance(spec, TensorSpec) and spec.dtype in (torch.bool, torch.uint8):
            dim += len(spec.shape)
            continue
        if isinstance(index, fx.Node):
            limits[index] = min(limits.get(index, shape[dim]), shape[dim])
        dim += 1
    return limits


# ---- values ----


class Maker:
    """Makes arguments; draws from a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.host_generator = torch.Generator().manual_seed(0)

    def call(self, node: fx.Node) -> Call:
        """An op with arguments made for it."""
        limits = index_limits(node)
        pointwise = torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        made: dict[fx.Node, Any] = {}
        memory: dict[fx.Node, Memory] = {}

        def argument(source: fx.Node) -> Any:
            if source not in made:
                spec = value_of(source)
                opaque = self._workspace(source, spec)
                if opaque is not None:
                    made[source] = opaque
                elif isinstance(spec, TensorSpec):
                    limit = limits.get(source, 9 if pointwise else 1)
                    made[source], memory[source] = self._tensor(spec, limit, pointwise, packet in ASCENDING)
                elif isinstance(spec, (list, tuple)):
                    made[source] = [
                        self._tensor(one, 1, pointwise, False)[0] if isinstance(one, TensorSpec) else one
                        for one in spec
                    ]
                else:
                    made[source] = spec
            return made[source]

        args = tuple(fx.node.map_aggregate(node.args, lambda arg: argument(arg) if isinstance(arg, fx.Node) else arg))
        kwargs = {
            name: fx.node.map_aggregate(value, lambda arg: argument(arg) if isinstance(arg, fx.Node) else arg)
            for name, value in node.kwargs.items()
        }
        return Call(node.target, args, kwargs, memory)  # type: ignore[arg-type]

    def _workspace(self, source: fx.Node, spec: Any) -> torch.Tensor | None:
        """Bytes that one kernel leaves to another (oneDNN's and cuDNN's LSTM): only the kernel can make them."""
        if not (isinstance(spec, TensorSpec) and spec.dtype == torch.uint8 and source.target is operator.getitem):
            return None
        producer, position = source.args
        if isinstance(producer, fx.Node) and isinstance(producer.target, torch._ops.OpOverload):
            return self.call(producer)()[position]
        return None

    def _tensor(self, spec: TensorSpec, limit: int, pointwise: bool, ascending: bool) -> tuple[torch.Tensor, Memory]:
        extent = max(spec.extent, 1)
        words = torch.empty(-(-extent * spec.dtype.itemsize // 8), dtype=torch.int64, device=spec.device)
        flat = words.view(spec.dtype)[:extent]
        self._fill(flat, max(limit, 1), pointwise, ascending)
        return flat.as_strided(spec.shape, spec.stride), Memory(words)

    def _fill(self, flat: torch.Tensor, limit: int, pointwise: bool, ascending: bool) -> None:
        """Numbers in (0, 1), which every function takes; integers below `limit`; runs of booleans."""
        count, dtype = flat.numel(), flat.dtype
        generator = self.generator if flat.device.type == self.generator.device.type else self.host_generator
        if ascending and not dtype.is_floating_point:
            flat.copy_(torch.linspace(0, limit - 1, count, device=flat.device, dtype=torch.float64).floor())
            return
        size = min(count, BLOCK)
        if dtype == torch.bool:
            runs = torch.rand(-(-size // RUN), device=flat.device, generator=generator) < 0.5
            block = runs.repeat_interleave(RUN)[:size]
        elif dtype.is_floating_point or dtype.is_complex:
            block = torch.rand(size, device=flat.device, generator=generator)
        else:
            low = 1 if pointwise and limit > 1 else 0  # nothing is divided by zero
            block = torch.randint(low, limit, (size,), device=flat.device, generator=generator)
        whole = count // size * size
        flat[:whole].view(-1, size).copy_(block)
        flat[whole:].copy_(block[: count - whole])
