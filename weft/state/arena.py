"""One block of memory for everything that comes and goes within a step, with offsets fixed when a program is made."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.state.layout import ALIGNMENT, round_up


@dataclass(frozen=True)
class Lease:
    """A buffer's size and the stretch of a program (node positions, both ends included) in which it is in use."""

    key: tuple[str, int]  # what it is, of which bucket
    nbytes: int
    start: int
    stop: int

    def overlaps(self, other: Lease) -> bool:
        return self.start <= other.stop and other.start <= self.stop


@dataclass(frozen=True)
class Placement:
    """Offsets of a program's buffers in the arena."""

    offsets: dict[tuple[str, int], int]
    nbytes: int


def place(leases: Sequence[Lease]) -> Placement:
    """Give buffers that are never in use together the same memory.

    Two orders are tried, each buffer as low as it fits: by time, which is best for buffers of one size, and largest
    first.
    """
    by_time = _place_in_order(sorted(leases, key=lambda lease: (lease.start, lease.stop, lease.key)))
    by_size = _place_in_order(sorted(leases, key=lambda lease: (-lease.nbytes, lease.start, lease.key)))
    return min(by_time, by_size, key=lambda placement: placement.nbytes)


def _place_in_order(leases: Sequence[Lease]) -> Placement:
    placed: list[tuple[int, int, Lease]] = []  # by where they start
    offsets: dict[tuple[str, int], int] = {}
    for lease in leases:
        size = round_up(lease.nbytes, ALIGNMENT)
        offset = 0
        for start, end, other in placed:
            if not lease.overlaps(other):
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[lease.key] = offset
        insort(placed, (offset, offset + size, lease), key=lambda entry: entry[0])
    return Placement(offsets, max((end for _, end, _ in placed), default=0))


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
