"""One block of memory for everything that comes and goes within a step, with offsets fixed when a program is made."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from weft.state.layout import ALIGNMENT, round_up


@dataclass(frozen=True)
class Lease:
    """A buffer's size and the stretches of a program (node positions, both ends included) in which it is in use."""

    key: Hashable
    nbytes: int
    spans: tuple[tuple[int, int], ...]

    def overlaps(self, other: Lease) -> bool:
        return any(a <= d and c <= b for a, b in self.spans for c, d in other.spans)


@dataclass(frozen=True)
class Placement:
    """Offsets of a program's buffers in the arena."""

    offsets: dict[Hashable, int]
    nbytes: int


def place(leases: Sequence[Lease]) -> Placement:
    """Give buffers that are never in use together the same memory: largest first, each as low as it fits."""
    placed: list[tuple[int, int, Lease]] = []
    offsets: dict[Hashable, int] = {}
    total = 0
    for lease in sorted(leases, key=lambda lease: (-lease.nbytes, str(lease.key))):
        size = round_up(lease.nbytes, ALIGNMENT)
        offset = 0
        for start, end, other in sorted(placed, key=lambda entry: entry[0]):
            if not lease.overlaps(other):
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[lease.key] = offset
        placed.append((offset, offset + size, lease))
        total = max(total, offset + size)
    return Placement(offsets, total)


class Arena:
    """The block itself; grows when a program needs more than those before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def reserve(self, nbytes: int) -> bool:
        """Make room for a program; True if earlier views are void because the block moved."""
        if nbytes <= self.memory.numel():
            return False
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)  # free the old block first
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return True

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)
