"""What a trace may leave behind on the user's modules, and what forward may not do to them."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch import FakeTensor, op_schema, plain_tensor_access, storage_key
from weft.errors import TraceError, UnlocatedTraceError
from weft.trace.functional import OURS, last_user_line


def _keep(value: Any, kept: dict[int, tuple[Any, Any]]) -> None:
    """Remember the contents of plain containers, nested ones included, by identity."""
    if not isinstance(value, (dict, list, set, deque)) or id(value) in kept:
        return
    kept[id(value)] = (value, copy.copy(value))
    for item in value.values() if isinstance(value, dict) else value:
        _keep(item, kept)


class _Saved:
    """One module's attributes as they were, contents of plain containers included."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.containers: dict[int, tuple[Any, Any]] = {}
        for value in self.attributes.values():
            _keep(value, self.containers)

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for value, contents in self.containers.values():
            value.clear()
            if isinstance(value, (list, deque)):
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
        schema = op_schema(func)
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
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
            if tensor.is_meta:
                raise TraceError(
                    f"the step reads a tensor of shape {list(tensor.shape)} on the meta device that is neither a "
                    "parameter nor a buffer, so nothing ever gives it values: make it a buffer (register_buffer), "
                    "build it with device='cpu', or compute it in forward"
                )


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


@contextmanager
def fixed_state(model: nn.Module) -> Iterator[None]:
    """Refuse, at the line that does it, parameters assigned in forward, new buffers, and buffers of another shape."""
    mine = set(model.modules())

    def on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
        if module in mine:
            raise TraceError(f"forward assigns the parameter {name}: {PARAMETER_ADVICE}")

    def on_buffer(module: nn.Module, name: str, buffer: Any) -> None:
        if module not in mine or buffer is None:
            return
        old = module._buffers.get(name)
        if old is None:
            raise TraceError(
                f"forward registers a new buffer, {name}: register them in __init__, so that they are part of the "
                "model's state"
            )
        if (buffer.shape, buffer.dtype, buffer.device) != (old.shape, old.dtype, old.device):
            raise TraceError(
                f"forward turns the buffer {name} from {describe(old)} into {describe(buffer)}; a buffer that lives "
                "from step to step must keep its shape, dtype and device"
            )

    handles = [
        register_module_parameter_registration_hook(on_parameter),
        register_module_buffer_registration_hook(on_buffer),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def reseeding_located() -> Iterator[None]:
    """Raise a located error at the end if a user's line called a `manual_seed`. Slow: for the way to an error only."""
    found: list[str] = []
    torch_folder, our_folder = OURS

    def watch(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", "")
        if event not in ("call", "c_call") or name != "manual_seed":
            return
        caller = frame
        while caller is not None and caller.f_code.co_filename.startswith((torch_folder, "<")):
            caller = caller.f_back
        if caller is not None and not caller.f_code.co_filename.startswith(our_folder):
            found.append(f"{caller.f_code.co_filename}:{caller.f_lineno}: {caller.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    except UnlocatedTraceError as error:
        raise TraceError(f"{error}\n  at {found[0]}" if found else str(error)) from None
    finally:
        sys.setprofile(before)


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
            frames = "".join(cast(Any, function).metadata.get("traceback_", ()))
            if not frames:
                raise UnlocatedTraceError(REENTRANT_ADVICE)
            raise TraceError(f"{REENTRANT_ADVICE}\n  at {last_user_line(frames) or 'a line that is not known'}")
        waiting.extend(next_function for next_function, _ in function.next_functions)


REENTRANT_ADVICE = (
    "activation checkpointing with use_reentrant=True cannot be captured. Call checkpoint(..., use_reentrant=False); "
    "with transformers: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)
