"""What a trace may leave behind on the user's modules, and what forward may not do to them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch import FakeTensor, plain_tensor_access, storage_key
from weft.errors import TraceError

CONTAINERS = (dict, list, set)


class _Saved:
    """One module's attributes as they were, contents of plain containers included (one level)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.contents = {
            name: copy.copy(value) for name, value in self.attributes.items() if isinstance(value, CONTAINERS)
        }

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for name, contents in self.contents.items():
            value: Any = self.attributes[name]
            value.clear()
            if isinstance(value, list):
                value.extend(contents)
            else:
                value.update(contents)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put every attribute of every module back at the end: a trace leaves fake tensors and counters behind."""
    saved = [_Saved(module) for module in model.modules()]
    try:
        yield
    finally:
        for module in saved:
            module.restore()


PARAMETER_ADVICE = (
    "the optimizer owns parameters, and a changed one would differ from rank to rank. Compute a new tensor from it "
    "instead, or change it between steps inside step.gathered()"
)


class ParameterGuard(TorchDispatchMode):
    """Refuses, at the line that does it, a write to a parameter and a parameter that the graph would freeze.

    `traced` are the fake tensors that stand for parameters in this trace, `real` the user's own: one of these reaches
    an op only by a way around the modules.
    """

    def __init__(self, traced: dict[str, torch.Tensor], real: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.traced = {storage_key(tensor): name for name, tensor in traced.items()}
        with plain_tensor_access():
            self.real = {storage_key(tensor) for tensor in real}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                    self._check_constant(tensor)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, torch.Tensor) and storage_key(value) in self.traced:
                    raise TraceError(
                        f"the step changes the parameter {self.traced[storage_key(value)]} in place ({func}): "
                        f"{PARAMETER_ADVICE}"
                    )
        return func(*args, **kwargs)

    def _check_constant(self, tensor: torch.Tensor) -> None:
        with plain_tensor_access():
            if tensor.requires_grad or storage_key(tensor) in self.real:
                raise TraceError(
                    f"the step reads a tensor of shape {list(tensor.shape)} that requires grad or shares a parameter's "
                    "memory, and is not reached through the model's modules (a Python list of parameters, a saved "
                    "reference, a detached copy). It would be frozen at its value of now: use nn.ParameterList, or "
                    "reach it as an attribute of its module"
                )


def check_no_reentrant_checkpoint(loss: torch.Tensor) -> None:
    """Reentrant checkpointing hides the parameters inside it from `autograd.grad`, without an error."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if function.name() == "CheckpointFunctionBackward":
            code = getattr(getattr(function, "run_function", None), "__code__", None)
            where = f"\n  at {code.co_filename}:{code.co_firstlineno}: {code.co_qualname}" if code else ""
            raise TraceError(REENTRANT_ADVICE + where)
        waiting.extend(next_function for next_function, _ in function.next_functions)


REENTRANT_ADVICE = (
    "activation checkpointing with use_reentrant=True cannot be captured. Call checkpoint(..., use_reentrant=False); "
    "with transformers: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)
