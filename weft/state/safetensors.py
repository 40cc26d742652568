"""Read any part of a tensor from a safetensors file, and write such files as the tensors come.

The format is a length, a JSON header with each tensor's dtype, shape and place, and the bytes. The public reader gives
whole tensors or rows of them; a rank's slice of a flat bucket begins and ends anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class DamagedFile(ValueError):
    """A file is not what its header says, or has no header."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in bytes, from the beginning of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened tensor, as a flat tensor of its own."""
        stop = self.numel if stop is None else stop
        values = torch.empty(stop - start, dtype=self.dtype)
        if values.numel():
            raw = values.view(torch.uint8).numpy().data
            with open(self.path, "rb") as file:
                file.seek(self.start + start * self.dtype.itemsize)
                if file.readinto(raw) != len(raw):
                    raise DamagedFile(f"{self.path} ends in the middle of {self.name}: copy or save it again")
        return values


def header(path: str | Path) -> dict[str, Stored]:
    """The tensors of a file, by name."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise DamagedFile(f"{path} is not a safetensors file, or was cut off ({size} bytes)")
        try:
            entries: dict[str, Any] = json.loads(file.read(length))
            found = {
                name: Stored(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
                for name, entry in entries.items()
                if name != "__metadata__"
                for start in (entry["data_offsets"][0],)
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{path} has a damaged header: {type(error).__name__}: {error}") from error
    for stored in found.values():
        if stored.start + stored.numel * stored.dtype.itemsize > size:
            raise DamagedFile(f"{path} was cut off: it has {size} bytes, and {stored.name} lies beyond them")
    return found


class Writable(Protocol):
    """What `write_to` needs of a file."""

    def write(self, data: memoryview | bytes) -> Any: ...


def write(
    path: str | Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors of known dtypes and shapes, taking their values one by one; the file is on the disk at return."""
    with open(path, "wb") as file:
        write_to(file, tensors, values, metadata)
        file.flush()
        os.fsync(file.fileno())


def write_to(
    file: Writable,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """The same into an open file; returns the byte at which each tensor starts."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, value in zip(tensors, values, strict=True):
        _write_one(file, value)
    return {name: 8 + len(text) + start for name, start in starts.items()}


def _write_one(file: Writable, value: torch.Tensor) -> None:
    flat = value.detach().cpu().contiguous().view(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)
