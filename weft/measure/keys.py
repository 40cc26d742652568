"""The text under which the time of an op is kept: equal for two nodes exactly if they compute equally much."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from weft.measure.values import TensorSpec, is_view, value_of

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def op_key(node: fx.Node) -> str:
    """What an op node computes: its target, and of each argument dtype, shape and stride, or the value itself.

    Open sizes count as what they are in the batch that was traced. A view takes the same time whatever it views.
    """
    target = target_name(node.target)
    if not isinstance(node.target, torch._ops.OpOverload):
        return target  # Python's own: an item of a tuple, arithmetic of sizes
    if is_view(node):
        return f"{target} view"
    seen: dict[fx.Node, int] = {}
    parts = [_text(arg, seen) for arg in node.args]
    parts += [f"{name}={_text(node.kwargs[name], seen)}" for name in sorted(node.kwargs)]
    return f"{target}({', '.join(parts)})"


def target_name(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', repr(target))}"


def _text(value: Any, seen: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        if value in seen:
            return f"%{seen[value]}"  # x * x reads one tensor, x * y two
        seen[value] = len(seen)
        return _describe(value_of(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, seen) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item, seen)}' for key, item in sorted(value.items()))}}}"
    if isinstance(value, slice):
        return f"{_text(value.start, seen)}:{_text(value.stop, seen)}:{_text(value.step, seen)}"
    return _describe(value)


def _describe(value: Any) -> str:
    if isinstance(value, TensorSpec):
        name = DTYPES.get(value.dtype) or str(value.dtype)
        text = f"{name}[{','.join(map(str, value.shape))}]"
        dense, expected = True, 1
        for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
            if size != 1 and stride != expected:
                dense = False
                break
            expected *= size
        return text if dense else f"{text}({','.join(map(str, value.stride))})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_describe(item) for item in value)}]"
    if isinstance(value, torch.device):
        return value.type  # the same on every rank of a host
    return str(value) if value is None or not isinstance(value, str) else repr(value)
