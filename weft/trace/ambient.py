"""Python values that forward may read and a user may change between steps: a dropout's `p`, a flag, a loss weight.

A graph keeps the values that it was traced with. `Ambient` notices that one has changed, and the step is traced again.
It watches plain values and tensors in the attributes of modules, in globals that their code names, and in the closure,
globals, arguments and object of the loss function. What is inside other objects (lists, configurations) is not watched.
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weft._torch import WeakIdKeyDictionary
from weft.trace.signature import PLAIN, PlainValue

CHANGES_BEFORE_WARNING = 10
VERSIONS_KEPT = 256
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Absent:
    """Stands for a value that is not there."""


ABSENT = _Absent()


class _Closure(Mapping[str, Any]):
    """A function's closure, as a mapping from names to values."""

    def __init__(self, function: types.FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


class _Place:
    """One watched name."""

    def __init__(self, space: Mapping[str, Any], name: str, label: str) -> None:
        self.space, self.name, self.label = space, name, label
        self.seen = space.get(name, ABSENT)
        self.changes = 0
        self.ignored = False


class Ambient:
    """Watches the plain values around a step; `version()` is the same number exactly for the same values."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._places: dict[tuple[int, str], _Place] = {}
        self._open: list[tuple[Mapping[str, Any], int, str]] = []  # modules' attributes, to which new ones may come
        self._mentioned: set[str] = set()  # every name in the code of the model and the loss
        self._kinds: set[type] = {nn.Module, object}  # classes whose code has been looked at
        self._numbers: Any = WeakIdKeyDictionary()  # of tensors: compared by identity
        self._counter = itertools.count()
        self._versions: OrderedDict[Hashable, int] = OrderedDict()
        self._last_changed: list[_Place] = []
        own = set(model.modules())
        for path, module in model.named_modules():
            self._watch_module(module, path, own)
        self._watch_callable(loss, "the loss function's ", own)
        self._first = {key: self._key(place.seen) for key, place in self._places.items()}
        self.previous = self._current = self._number()

    def version(self) -> int:
        """The number of the values as they are now; takes microseconds where none has changed."""
        grown = any(len(space) != size for space, size, _ in self._open)
        if grown:
            self._watch_new_attributes()
        changed = [p for p in self._places.values() if p.space.get(p.name, ABSENT) is not p.seen]
        if not changed and not grown:
            return self._current
        different = []
        for place in changed:
            value = place.space.get(place.name, ABSENT)
            if self._key(value) != self._key(place.seen) and not place.ignored:
                different.append(place)
            place.seen = value
        if different or grown:
            self.previous, self._current = self._current, self._number()
            self._last_changed = different
        for place in different:
            place.changes += 1
            if place.changes == CHANGES_BEFORE_WARNING:
                warnings.warn(
                    f"{place.label} has changed {place.changes} times between steps, and the step is traced again for "
                    "every new value: pass it in the batch as a tensor, or keep it in a buffer",
                    stacklevel=4,
                )
        return self._current

    def did_not_matter(self) -> None:
        """The last change left the graph as it was: stop watching what cannot have been read.

        What the code mentions may still matter at another time (`if self.calls > 100`) or in another signature.
        """
        for place in self._last_changed:
            place.ignored = place.name not in self._mentioned
        self._current = self._number()

    # ---- what is watched ----

    def _watch(self, space: Mapping[str, Any], name: str, label: str) -> None:
        self._places.setdefault((id(space), name), _Place(space, name, label))

    def _watch_module(self, module: nn.Module, path: str, own: set[nn.Module]) -> None:
        attributes = vars(module)
        prefix = f"{path}." if path else "model."
        for name in attributes:
            # The training flags of the model's own modules are part of the signature.
            if name not in OF_EVERY_MODULE or (name == "training" and module not in own):
                self._watch(attributes, name, prefix + name)
        self._open.append((attributes, len(attributes), prefix))
        for kind in set(type(module).__mro__) - self._kinds:
            self._kinds.add(kind)
            for name, member in vars(kind).items():
                if name != "__init__":
                    self._watch_code(getattr(member, "__func__", getattr(member, "fget", member)))

    def _watch_new_attributes(self) -> None:
        for index, (attributes, size, prefix) in enumerate(self._open):
            if len(attributes) == size:
                continue
            self._open[index] = (attributes, len(attributes), prefix)
            for name in attributes:
                if name not in OF_EVERY_MODULE and (id(attributes), name) not in self._places:
                    self._watch(attributes, name, prefix + name)
                    self._first[id(attributes), name] = self._key(ABSENT)

    def _watch_callable(self, function: Any, prefix: str, own: set[nn.Module]) -> None:
        if isinstance(function, functools.partial):
            for argument in function.args:
                self._watch_object(argument, prefix, own)
            self._watch_values(function.keywords, function.keywords, prefix, own)
            self._watch_callable(function.func, prefix, own)
        elif isinstance(function, types.MethodType):
            self._watch_object(function.__self__, prefix, own)
            self._watch_callable(function.__func__, prefix, own)
        elif isinstance(function, types.FunctionType):
            closure = _Closure(function)
            self._watch_values(closure, closure, prefix, own)
            used = [name for name in _names_in(function.__code__) if name in function.__globals__]
            self._watch_values(function.__globals__, used, prefix, own)
            self._watch_code(function)
        else:
            self._watch_object(function, prefix, own)
            self._watch_code(type(function).__call__)

    def _watch_object(self, value: Any, prefix: str, own: set[nn.Module]) -> None:
        if isinstance(value, nn.Module):
            if value not in own:
                for path, module in value.named_modules():
                    self._watch_module(module, prefix + path, own)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, types.FunctionType)):
            self._watch_values(vars(value), list(vars(value)), prefix, own)

    def _watch_values(self, space: Mapping[str, Any], names: Any, prefix: str, own: set[nn.Module]) -> None:
        """Plain values by their names, and modules (a criterion kept beside the model) by their attributes."""
        for name in names:
            value = space.get(name, ABSENT)
            if isinstance(value, nn.Module):
                self._watch_object(value, f"{prefix}{name}.", own)
            elif _plain(value) or isinstance(value, torch.Tensor):
                self._watch(space, name, prefix + name)

    def _watch_code(self, function: Any) -> None:
        """Note the names in a function's code, and watch the plain globals among them."""
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType):
            return
        names = _names_in(function.__code__)
        self._mentioned |= names
        for name in names:
            if _plain(function.__globals__.get(name, ABSENT)):
                self._watch(function.__globals__, name, f"{function.__module__}.{name}")

    # ---- values ----

    def _key(self, value: Any) -> Hashable:
        if _plain(value):
            return PlainValue(value) if not isinstance(value, tuple) else tuple(map(PlainValue, value))
        if isinstance(value, torch.Tensor):
            if value not in self._numbers:
                self._numbers[value] = next(self._counter)
            return ("tensor", self._numbers[value])
        return "absent" if value is ABSENT else "not plain"

    def _number(self) -> int:
        """A number for the values seen last, by how they differ from the first ones."""
        values = frozenset(
            (key, now)
            for key, place in self._places.items()
            if not place.ignored and (now := self._key(place.seen)) != self._first[key]
        )
        if values not in self._versions:
            self._versions[values] = next(self._counter)
            if len(self._versions) > VERSIONS_KEPT:
                self._versions.popitem(last=False)
        return self._versions[values]


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(item, PLAIN) for item in value))


def _names_in(code: types.CodeType) -> set[str]:
    """Every name and string in a function's code, functions inside it included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
