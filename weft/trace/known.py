"""Which trace serves a batch: one of just these sizes, one with open sizes whose guards pass, or a new one.

The first batch of a structure is traced as it is. When another comes that differs in sizes alone, the sizes that vary
are left open, and the graph serves all batches that pass its guards. Where a model cannot be traced so, every new shape
is traced by itself; ten of them within 100 batches are worth a warning.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weft.trace.ambient import Ambient
from weft.trace.capture import Trace
from weft.trace.signature import Structure
from weft.trace.sizes import OpenDims, geometry

if TYPE_CHECKING:
    from weft.run.executor import Program

KEPT = 256  # batches whose trace is looked up by their exact sizes, and structures
OPEN_KEPT = 4  # graphs with open sizes of one structure: their guards are tried one after the other
NEW_BEFORE_WARNING, WITHIN = 10, 100

Capture = Callable[[OpenDims | None], Trace]


@dataclass
class Known:
    """What is kept of a trace: its programs so far, and which sizes it was asked to leave open."""

    trace: Trace
    open_dims: OpenDims | None
    programs: dict[str, Program] = field(default_factory=dict)


@dataclass
class _Family:
    """Batches of one structure: what varies among them, and the graphs with open sizes."""

    first: tuple[torch.Size, ...]
    varying: set[tuple[int, int]] = field(default_factory=set)
    fixed: set[tuple[int, int]] = field(default_factory=set)  # the model needs to know these
    open: list[Known] = field(default_factory=list)
    why_not: str | None = None  # sizes cannot be left open

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, (tensor, shape) in enumerate(zip(tensors, self.first, strict=True)):
            self.varying.update((number, dim) for dim, size in enumerate(shape) if tensor.size(dim) != size)

    def to_open(self, tensors: Sequence[torch.Tensor]) -> OpenDims | None:
        """The sizes to leave open in a new trace; None if there are none, or if it did not work before."""
        if self.why_not is not None or len(self.open) == OPEN_KEPT:
            return None
        # PyTorch treats sizes 0 and 1 as different in kind (nothing to do, broadcasting).
        dims = {(number, dim) for number, dim in self.varying - self.fixed if tensors[number].size(dim) > 1}
        if not dims:
            return None
        return tuple(frozenset(dim for n, dim in dims if n == number) for number in range(len(tensors)))

    def serving(self, sizes: tuple[int, ...]) -> Known | None:
        return next((k for k in self.open if k.trace.guards is not None and k.trace.guards.accept(sizes)), None)


class KnownTraces:
    """The traces of a step, found by batch."""

    def __init__(self, ambient: Ambient) -> None:
        self._ambient = ambient
        self._exact: OrderedDict[Hashable, Known] = OrderedDict()
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._calls = 0
        self._news: deque[tuple[int, Structure, tuple[torch.Size, ...]]] = deque(maxlen=NEW_BEFORE_WARNING)
        self._warned = False

    def find(self, tensors: Sequence[torch.Tensor], structure: Structure, capture: Capture) -> Known:
        """The trace for a batch; `capture` makes one, with the given sizes left open."""
        self._calls += 1
        sizes = geometry(tensors)
        version = self._ambient.version()
        known = self._exact.get((structure, sizes, version))
        if known is not None:
            self._exact.move_to_end((structure, sizes, version))
            return known
        family = self._family(structure, version, tensors)
        known = family.serving(sizes) or self._new(tensors, structure, sizes, family, capture)
        self._exact[structure, sizes, self._ambient.version()] = known
        if len(self._exact) > KEPT:
            self._exact.popitem(last=False)
        return known

    def forget_programs(self) -> None:
        """They were built by a plan that holds no longer; the traces stay."""
        for known in (*self._exact.values(), *(k for family in self._families.values() for k in family.open)):
            known.programs.clear()

    def _family(self, structure: Structure, version: int, tensors: Sequence[torch.Tensor]) -> _Family:
        key = (structure, version)
        if key not in self._families:
            # A value around the step may change with every batch; what varies in the batches is known all the same.
            before = self._families.get((structure, self._ambient.previous))
            first = tuple(tensor.shape for tensor in tensors)
            self._families[key] = _Family(before.first, set(before.varying)) if before else _Family(first)
            if len(self._families) > KEPT:
                self._families.popitem(last=False)
        self._families.move_to_end(key)
        self._families[key].note(tensors)
        return self._families[key]

    def _new(
        self,
        tensors: Sequence[torch.Tensor],
        structure: Structure,
        sizes: tuple[int, ...],
        family: _Family,
        capture: Capture,
    ) -> Known:
        before = self._before(structure, sizes)
        dims = family.to_open(tensors) if before is None else before.open_dims
        trace = None
        if dims is not None:
            try:
                trace = capture(dims)
            except Exception as error:  # whatever it is: the trace of this one shape works, or raises it again
                family.why_not = str(error).strip().split("\n")[0][:200]
        if trace is None:
            trace, dims = capture(None), None
        known = Known(trace, dims)
        if before is not None and before.trace.same_as(trace):
            self._ambient.did_not_matter()
            family = self._family(structure, self._ambient.version(), tensors)
            known = before
        if known.trace.guards is not None and known not in family.open:
            family.open.append(known)
            family.fixed.update(known.trace.guards.fixed)
        if known is not before:
            self._warn_of_many(structure, tensors, family)
        return known

    def _before(self, structure: Structure, sizes: tuple[int, ...]) -> Known | None:
        """What served such a batch before the values around the step changed."""
        previous = self._ambient.previous
        known = self._exact.get((structure, sizes, previous))
        if known is None and (structure, previous) in self._families:
            known = self._families[structure, previous].serving(sizes)
        return known

    def _warn_of_many(self, structure: Structure, tensors: Sequence[torch.Tensor], family: _Family) -> None:
        self._news.append((self._calls, structure, tuple(tensor.shape for tensor in tensors)))
        oldest = self._news[0][0]
        if self._warned or len(self._news) < NEW_BEFORE_WARNING or self._calls - oldest >= WITHIN:
            return
        varies = "; ".join(_what_varies([(structure, shapes) for _, structure, shapes in self._news]))
        if not varies:
            return  # values around the step do: `Ambient` names them
        self._warned = True
        why = f" Sizes could not be left open: {family.why_not}." if family.why_not else ""
        warnings.warn(
            f"{NEW_BEFORE_WARNING} of the last {self._calls - oldest + 1} batches had to be traced anew, which takes "
            f"longer than a step. What varies: {varies}.{why} Pass numbers as tensors, and "
            "pad batches to a few shapes",
            stacklevel=5,
        )


def _what_varies(seen: Sequence[tuple[Structure, tuple[torch.Size, ...]]]) -> list[str]:
    """In words, what differs among batches that were each traced."""
    found = []
    last = seen[-1][0]
    alike = [shapes for structure, shapes in seen if structure.spec.tree == last.spec.tree]
    names = last.spec.leaf_names()
    for leaf, entry in enumerate(last.spec.plain):
        if isinstance(entry, int):
            for dim in range(len(seen[-1][1][entry])):
                sizes = {shapes[entry][dim] for shapes in alike if len(shapes[entry]) > dim}
                if len(sizes) > 1:
                    found.append(f"size({dim}) of {names[leaf]} ({_some(sizes)})")
        else:
            values = {s.spec.plain[leaf] for s, _ in seen if s.spec.tree == last.spec.tree}
            if len(values) > 1:
                found.append(f"{names[leaf]} ({_some({str(getattr(v, 'value', 'a tensor')) for v in values})})")
    if len(alike) < len(seen):
        found.append("the keys or the nesting of the batch")
    if len({structure.modules for structure, _ in seen}) > 1:
        found.append("the training flags of modules")
    if len({(structure.autocast, structure.default_dtype) for structure, _ in seen}) > 1:
        found.append("autocast or the default dtype")
    if len({structure.kinds for structure, _ in seen}) > 1:
        found.append("dtypes or devices of tensors")
    return found


def _some(values: set[int] | set[str]) -> str:
    ordered = sorted(values)
    return ", ".join(map(str, ordered[:4])) + (", ..." if len(ordered) > 4 else "")
