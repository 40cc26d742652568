"""What a model's modules do to initialise themselves: which functions those are, and the in-place ops that they run.

`weft.state.initial` repeats what is recorded here, any part of a tensor at a time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch import op_schema, pytree, storage_key, trunc_normal_code
from weft.state.checks import dense_stride

aten = torch.ops.aten

_OVERWRITING = {"normal_", "uniform_", "trunc_normal_", "fill_", "zero_", "bernoulli_", "exponential_", "log_normal_"}
_OVERWRITING |= {"cauchy_", "geometric_", "random_"}


class UninitialisedError(ValueError):
    """A tensor on the meta device that nothing gives values to."""


@dataclass(frozen=True)
class Write:
    """An in-place op on elements `start` to `stop` of a parameter's memory, which does the same to each."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    start: int
    stop: int
    random: bool
    number: int = 0  # of its first chunk's draws

    @property
    def overwrites(self) -> bool:
        return self.name in _OVERWRITING

    def apply(self, values: torch.Tensor, low: int, generator: torch.Generator, seed: int) -> None:
        """Do it to a chunk that begins at element `low`; a draw is seeded with `seed` and the op's own numbers."""
        start, stop = max(self.start, low), min(self.stop, low + values.numel())
        if start >= stop:
            return
        keywords = dict(self.keywords)
        if self.random:
            # Consecutive seeds: two chunks never share one, as hashed seeds of 32 bits sooner or later would.
            generator.manual_seed((seed + self.number) % 2**32)
            keywords["generator"] = generator
        self.function(values[start - low : stop - low], *self.arguments, **keywords)


@dataclass(eq=False)
class Call:
    """One module's initialisation; `written` are the tensors that it is run for real for."""

    path: str
    module: nn.Module
    function: Callable[[], Any]
    touched: set[str] = field(default_factory=set)
    found: dict[str, int] = field(default_factory=dict)  # how many items the tensors that it touches had before
    written: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    failed: bool = False  # it looks at values, or mixes tensors that have some with others that have none


Item = Write | Call


class Recorder(TorchDispatchMode):
    """Notes what is done to the tensors in `tracked` (storage -> name)."""

    def __init__(self, tracked: Mapping[int, str], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.tracked, self.dtypes = tracked, dtypes
        self.touched: set[str] = set()
        self.writes: list[tuple[str, Write | None]] = []  # None: it cannot be done chunk by chunk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [self._name(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.touched.update(name for name in names if name is not None)
        truncated = _inside_trunc_normal() if func in _OF_TRUNC_NORMAL else None
        if truncated is not None and func is aten._local_scalar_dense.default:
            return False  # "was any number out of bounds": the rejection is repeated with the real numbers
        result = func(*args, **kwargs)
        schema = op_schema(func)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    name = self._name(tensor) if isinstance(tensor, torch.Tensor) else None
                    if name is not None:
                        self.writes.append((name, self._write(name, func, tensor, args, kwargs, truncated)))
        return result

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self.tracked.get(storage_key(tensor)) if tensor.layout is torch.strided else None

    def _write(
        self, name: str, func: Any, tensor: torch.Tensor, args: Sequence[Any], kwargs: Any, truncated: Any
    ) -> Write | None:
        interval = _interval(tensor)
        if interval is None or tensor.dtype != self.dtypes[name] or args[:1] != (tensor,):
            return None
        if truncated is not None:
            bounds = tuple(float(truncated[key]) for key in ("mean", "std", "a", "b"))
            return Write("trunc_normal_", nn.init.trunc_normal_, bounds, {}, *interval, random=True)
        kind = func.overloadpacket.__name__
        random = torch.Tag.nondeterministic_seeded in func.tags
        alike = random or torch.Tag.pointwise in func.tags or kind in _OVERWRITING
        keywords = {key: value for key, value in kwargs.items() if key != "generator"}
        if not alike or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args[1:], keywords))):
            return None
        return Write(kind, func, tuple(args[1:]), keywords, *interval, random=random)


_OF_TRUNC_NORMAL = {aten.normal_.default, aten.uniform_.default, aten._local_scalar_dense.default}


def _inside_trunc_normal() -> dict[str, Any] | None:
    """The arguments of the `nn.init.trunc_normal_` that calls, if one does: it draws until all numbers fit."""
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return None
        if frame.f_code is trunc_normal_code:
            return frame.f_locals
        frame = frame.f_back
    return None


def _interval(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The stretch of memory that a view covers, if it covers one without gaps."""
    if tensor.numel() and dense_stride(tensor) != tensor.stride():
        return None
    start = int(tensor.storage_offset())
    return start, start + tensor.numel()


def since_overwritten(items: Sequence[Item], numel: int) -> list[Item]:
    """The items from the last one on that gives every element a value."""
    for position in reversed(range(len(items))):
        item = items[position]
        if isinstance(item, Call) or (item.overwrites and item.start <= 0 and item.stop >= numel):
            return list(items[position:])
    return list(items)


def covered(items: Sequence[Item], numel: int) -> bool:
    """Whether every element is overwritten by some item."""
    if any(isinstance(item, Call) for item in items):
        return True
    end = 0
    for start, stop in sorted((i.start, i.stop) for i in items if isinstance(i, Write) and i.overwrites):
        if start > end:
            return False
        end = max(end, stop)
    return end >= numel


# ---- whose initialisation is run ----


def initialisations(model: nn.Module, init: Callable[[nn.Module], Any] | None, wanted: set[int]) -> Iterator[Call]:
    """Initialisations of all modules that hold (or whose children hold) wanted tensors, children first.

    A parent comes after its children, as in its own constructor, and what it writes wins; the user's `init` comes last.
    """
    if not wanted:
        return
    names = {module: path for path, module in model.named_modules()}

    def visit(module: nn.Module, pretrained: Any) -> Iterator[tuple[nn.Module, Any, bool]]:
        pretrained = module if _is_transformers_model(module) else pretrained
        holds = any(id(tensor) in wanted for tensor in (*module._parameters.values(), *module._buffers.values()))
        below = False
        for child in module.children():
            if child in names and child not in seen:
                seen.add(child)
                for visited in visit(child, pretrained):
                    below = True
                    yield visited
        if holds or below:
            yield module, pretrained, holds

    seen: set[nn.Module] = {model}
    visited = list(visit(model, None))
    for module, pretrained, _ in visited:
        function = _own_initialisation(module, pretrained, init)
        if function is not None:
            yield Call(names[module], module, function)
    if init is not None:
        for module, _, holds in visited:
            if holds:
                yield Call(f"{names[module]} (init)", module, _bound(init, module))


def _own_initialisation(module: nn.Module, pretrained: Any, init: Any) -> Callable[[], Any] | None:
    if pretrained is not None:
        return _bound(pretrained._init_weights, module)
    for name in ("reset_parameters", "_reset_parameters"):
        function = getattr(module, name, None)
        if callable(function) and not _required(function):
            return function
    other = next((name for name in ("_init_weights", "init_weights") if callable(getattr(module, name, None))), None)
    if other is not None and init is None:
        raise UninitialisedError(
            f"{type(module).__name__} is on the meta device and has a method {other}(), which weft does not call: it "
            "cannot know how it is meant, and calls each module's reset_parameters(). Pass what the model does itself "
            f"as weft.compile(..., init=function), for instance init=model.{other} if it takes a module"
        )
    return None


def _is_transformers_model(module: nn.Module) -> bool:
    kinds = type(module).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)


def _required(function: Callable[..., Any]) -> bool:
    """Whether a function cannot be called without arguments."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is inspect.Parameter.empty and p.kind not in kinds for p in parameters)


def _bound(function: Callable[[nn.Module], Any], module: nn.Module) -> Callable[[], Any]:
    return lambda: function(module)
