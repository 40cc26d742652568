"""What a traced graph depends on besides parameter values: the batch's structure and the state around the call.

`split_batch` takes a batch apart into tensors and a hashable rest; `structure_of` adds everything else that forward may
branch on. Two calls of equal structure and sizes share one graph.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft._torch import pytree, storage_key

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def _register(kind: Any) -> None:
    """Teach pytree about a batch type that it treats as a leaf: dict wrappers and dataclasses."""
    if issubclass(kind, collections.UserDict):

        def flatten(value: Any) -> tuple[list[Any], Any]:
            return list(value.data.values()), (tuple(value.data), _Shell(value))

        def unflatten(children: Any, context: Any) -> Any:
            keys, shell = context
            value = copy.copy(shell.value)
            value.data = dict(zip(keys, children, strict=True))
            return value

    else:
        names = [field.name for field in dataclasses.fields(kind)]

        def flatten(value: Any) -> tuple[list[Any], Any]:
            return [getattr(value, name) for name in names], _Shell(value)

        def unflatten(children: Any, context: Any) -> Any:
            value = copy.copy(context.value)
            for name, child in zip(names, children, strict=True):
                object.__setattr__(value, name, child)
            return value

    pytree.register_pytree_node(kind, flatten, unflatten)


class _Shell:
    """Carries an instance to copy from; equal to every other, since only the children tell batches apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class PlainValue:
    """A number, string or the like, equal to what a model cannot tell from it.

    1, 1.0 and True are equal in Python but not to a model, nor are 0.0 and -0.0; a NaN is equal to itself here.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = (type(value), repr(value) if isinstance(value, (float, complex)) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainValue) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The batch without its tensors; `join` puts tensors back in."""

    tree: Any
    plain: tuple[int | PlainValue, ...]  # one entry a leaf: the number of its tensor, or a plain value
    shared: tuple[int, ...]  # per tensor, the first one that lies in the same memory

    def join(self, tensors: Sequence[torch.Tensor]) -> Any:
        distinct = list(tensors)
        leaves = [distinct[entry] if isinstance(entry, int) else entry.value for entry in self.plain]
        return pytree.tree_unflatten(leaves, self.tree)

    def leaf_names(self) -> list[str]:
        """What a user would write to get at each leaf."""
        try:
            numbered = pytree.tree_unflatten(list(range(len(self.plain))), self.tree)
            paths, _ = pytree.tree_flatten_with_path(numbered)
            return [f"batch{pytree.keystr(path)}" for path, _ in paths]
        except ValueError:  # a container that has no paths
            return [f"leaf {number} of the batch" for number in range(len(self.plain))]


def split_batch(batch: Any) -> tuple[list[torch.Tensor], BatchSpec]:
    """The tensors of a batch, and everything else as one hashable value."""
    while True:
        leaves, tree = pytree.tree_flatten(batch)
        unknown = {
            type(leaf)
            for leaf in leaves
            if isinstance(leaf, collections.UserDict)
            or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not isinstance(leaf, PLAIN))
        }
        if not unknown:
            break
        for kind in unknown:
            _register(kind)
    tensors: list[torch.Tensor] = []
    plain: list[int | PlainValue] = []
    number: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # A tensor that is in the batch twice is one input: a change of it is seen in both places.
            if id(leaf) not in number:
                number[id(leaf)] = len(tensors)
                tensors.append(leaf)
            plain.append(number[id(leaf)])
        elif isinstance(leaf, PLAIN):
            plain.append(PlainValue(leaf))
        else:
            raise TypeError(
                f"the batch holds a {type(leaf).__module__}.{type(leaf).__qualname__}; weft takes tensors and plain "
                "values (numbers, strings, None) in dicts, lists, tuples and dataclasses. Convert it to a tensor "
                "before the call, for instance with torch.as_tensor."
            )
    storages = [storage_key(tensor) for tensor in tensors]
    return tensors, BatchSpec(tree, tuple(plain), tuple(storages.index(key) for key in storages))


def check_batch_device(tensors: Sequence[torch.Tensor], spec: BatchSpec, device: torch.device) -> None:
    """Raise for tensors that are not where the model is (a single number may be on the CPU, as in eager)."""
    for number, tensor in enumerate(tensors):
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            leaf = spec.plain.index(number)
            raise ValueError(
                f"{spec.leaf_names()[leaf]} is on {tensor.device} and the model is on {device}: move the batch before "
                f"the call, for instance with tensor.to({str(device)!r})"
            )


def _autocast_state(device_type: str) -> Hashable:
    kinds = dict.fromkeys(("cpu", device_type))
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)


class Structure(NamedTuple):
    """Everything a trace depends on but the sizes and strides of the batch's tensors."""

    training: bool
    kinds: tuple[Hashable, ...]  # of the tensors
    spec: BatchSpec
    autocast: Hashable
    default_dtype: torch.dtype
    modules: tuple[bool, ...]  # their training flags
    buffers: tuple[Hashable, ...]


def structure_of(
    tensors: Sequence[torch.Tensor],
    spec: BatchSpec,
    modules: Sequence[nn.Module],
    buffers: Sequence[torch.Tensor],
    device: torch.device,
    training: bool,
) -> Structure:
    """What batches that one graph may serve have in common."""
    return Structure(
        training=training,
        kinds=tuple((tensor.dim(), tensor.dtype, tensor.device) for tensor in tensors),
        spec=spec,
        autocast=_autocast_state(device.type),
        default_dtype=torch.get_default_dtype(),
        modules=tuple(module.training for module in modules),
        buffers=tuple((tuple(b.shape), b.stride(), b.dtype, device if b.is_meta else b.device) for b in buffers),
    )
