"""Plain Python values as JSON and back, types kept: nothing in a checkpoint is ever unpickled.

What JSON lacks is an object with one tagged key. Tensors of one element are written out; the others are handed to the
caller, who stores them as data.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.state.checks import dense_stride
from weft.state.safetensors import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAPPINGS: dict[str, type] = {"$dict": dict, "$counter": Counter, "$ordered": OrderedDict}


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON. Tensors go to `tensors`, flat, under names that start with `where`."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value.detach(), where, tensors)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple):
        items = [encode(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    tag = next((tag for tag, kind in _MAPPINGS.items() if type(value) is kind), None)
    if tag is None:
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint keeps None, bool, int, float, str, tensors, and lists, "
            "tuples and dicts of them. Save a plain value instead, for instance an object's state_dict()"
        )
    if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}/{key}", tensors) for key, item in value.items()}
    return {tag: [[encode(k, where, tensors), encode(v, f"{where}/{k}", tensors)] for k, v in value.items()]}


def _encode_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value.dtype not in NAMES:
        raise TypeError(f"{where} is a tensor of {value.dtype}; a checkpoint keeps {', '.join(map(str, NAMES))}")
    name = NAMES[value.dtype]
    if value.dim() == 0 and not value.is_complex():
        return {"$scalar": [name, encode(value.item(), where, tensors)]}
    stride = dense_stride(value)
    while where in tensors:  # {"a/b": x, "a": {"b": y}}
        where += "'"
    if value.numel():
        tensors[where] = flat_view(value)
    return {"$tensor": where, "dtype": name, "shape": list(value.shape), "stride": list(stride)}


def flat_view(value: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory; copied into dense order if there are gaps."""
    stride = dense_stride(value)
    if value.stride() != stride:
        value = value.contiguous()
    return value.as_strided((value.numel(),), (1,))


def decode(data: Any, read: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    """What `encode` was given; `read` answers with the tensor that an entry describes."""
    if isinstance(data, list):
        return [decode(item, read) for item in data]
    if not isinstance(data, dict):
        return data
    for tag, inner in data.items():
        if tag == "$tensor":
            return read(data)
        if tag == "$scalar":
            return torch.tensor(decode(inner[1], read), dtype=DTYPES[inner[0]])
        if tag == "$float":
            return float(inner)
        if tag == "$dtype":
            return getattr(torch, inner)
        if tag == "$tuple":
            return tuple(decode(item, read) for item in inner)
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]({decode(key, read): decode(item, read) for key, item in inner})
    return {key: decode(item, read) for key, item in data.items()}
