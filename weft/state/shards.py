"""A rank's part of one bucket: master values, whole parameters where they stay gathered, optimizer state."""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from weft.state.layout import Bucket
from weft.state.optimizer import BucketOptimizer

if TYPE_CHECKING:
    from weft.state.fragments import Fragment


class BucketState:
    """What this rank keeps of a bucket between steps.

    `master` is what the optimizer updates: the rank's slice, or everything where the update is replicated. `full` is
    the whole bucket in the compute dtype, None where it is sharded between uses. Where dtypes agree `master` is a view
    of `full`, so that an update is seen without a copy.

    `flat` is the whole bucket; where it is sharded it may be this rank's slice alone.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        flat: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *,
        fused: bool = False,
    ) -> None:
        self.bucket = bucket
        self.own = bucket.slice(rank) if bucket.scatter else slice(0, bucket.numel)
        same = bucket.compute == bucket.master
        self.full: torch.Tensor | None = None
        if not bucket.sharded:
            self.full = flat if same else flat.to(bucket.compute)
        if self.full is not None and same:
            self.master = self.full[self.own]
        else:
            whole = bucket.scatter and flat.numel() == bucket.numel
            self.master = flat[self.own].clone() if whole and bucket.world > 1 else flat
        self.views: tuple[torch.Tensor, ...] = ()
        if self.full is not None:
            self.views = tuple(slot.view(self.full) for slot in bucket.slots)
        self.optimizer = (
            BucketOptimizer(optimizer, bucket, self.own, self.master, fused=fused)
            if optimizer is not None and bucket.trained
            else None
        )
        self.fragment: Fragment | None = None  # where the optimizer's state is offloaded

    def state_in_memory(self) -> AbstractContextManager[None]:
        """While the optimizer's state is read outside a step."""
        return nullcontext() if self.fragment is None else self.fragment.in_memory()

    def put_out(self) -> None:
        """After the optimizer's state was replaced: offload it again."""
        if self.fragment is not None:
            self.fragment.put_out()

    def refresh(self) -> None:
        """After an update: bring this rank's part of the whole parameters up to date."""
        if self.full is not None and self.bucket.compute != self.bucket.master:
            self.full[self.own].copy_(self.master)

    def write_back(self, whole: torch.Tensor) -> None:
        """Take over a whole bucket in the master dtype, as a user may have changed it."""
        self.master.copy_(whole[self.own])
        if self.full is not None and self.bucket.compute != self.bucket.master:
            self.full.copy_(whole)


def return_freed_memory() -> None:
    """Give what the allocator keeps of the model's own copy back to the system, where glibc is the allocator."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def flatten(bucket: Bucket, parameters: list[torch.Tensor]) -> torch.Tensor:
    """A bucket's values in one flat tensor of the master dtype, padding zero."""
    device = parameters[bucket.slots[0].parameter].device
    flat = torch.zeros(bucket.numel, dtype=bucket.master, device=device)
    for slot in bucket.slots:
        slot.view(flat).copy_(parameters[slot.parameter])
    return flat
