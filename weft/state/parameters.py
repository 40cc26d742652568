"""The user's parameters after compile: they guard themselves while their values are in flight or sharded.

A parameter stays the object it was (optimizers, EMA copies and tied modules hold references to it); only its class
changes, as PyTorch's own `UninitializedParameter` does when it becomes real. Any operation that would read or write its
values asks its guard first; shape, dtype and the like are always free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft._torch import plain_tensor_access, pytree, swap_values

_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "ndim",
    "names",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_xpu",
    "is_mps",
    "is_mkldnn",
    "is_nested",
    "is_sparse_csr",
    "itemsize",
    "nbytes",
    "grad",
    "grad_fn",
    "_version",
    "_backward_hooks",
    "retains_grad",
    "output_nr",
    "name",
    "volatile",
]
_METHODS = [
    "size",
    "stride",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_signed",
    "get_device",
    "is_inference",
    "has_names",
    "requires_grad_",
    "__hash__",
    "__len__",
    "storage_offset",
    "is_shared",
    "register_hook",
    "register_post_accumulate_grad_hook",
]


def _free_operations() -> set[Any]:
    found: set[Any] = {torch.numel, torch.is_tensor, torch.is_floating_point, torch.is_complex}
    for name in _ATTRIBUTES:
        descriptor = getattr(torch.Tensor, name, None)
        found.update(getattr(descriptor, kind, None) for kind in ("__get__", "__set__", "__delete__"))
    found.update(getattr(torch.Tensor, name, None) for name in _METHODS)
    return found - {None}


FREE = _free_operations()


class ManagedParameter(nn.Parameter):
    """A parameter whose values belong to a compiled step."""

    weft_guard: Callable[[str], None] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FREE:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, ManagedParameter):
                    guard = value.__dict__.get("weft_guard")
                    if guard is not None:
                        guard(value.__dict__.get("weft_name", "a parameter"))
        with plain_tensor_access():
            return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter({self.__dict__.get('weft_name')}, shape={tuple(self.shape)}, managed by weft)"


def manage(parameter: nn.Parameter, name: str, data: torch.Tensor, guard: Callable[[str], None] | None) -> None:
    """Give a parameter new memory, and a guard that is asked before its values are used (None: none is needed)."""
    with plain_tensor_access():
        if parameter.is_meta and not data.is_meta:
            # `.data` cannot be given memory of another kind.
            swap_values(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
        else:
            parameter.data = data
    if guard is None:
        if isinstance(parameter, ManagedParameter):
            _set_class(parameter, nn.Parameter)
        return
    parameter.__dict__["weft_guard"] = guard
    parameter.__dict__["weft_name"] = name
    _set_class(parameter, ManagedParameter)


def _set_class(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    parameter.__class__ = kind


def placeholder(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a parameter's shape that takes no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


@contextmanager
def unguarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Plain parameters for the length of a context."""
    guarded = [parameter for parameter in parameters if isinstance(parameter, ManagedParameter)]
    for parameter in guarded:
        _set_class(parameter, nn.Parameter)
    try:
        yield
    finally:
        for parameter in guarded:
            _set_class(parameter, ManagedParameter)
