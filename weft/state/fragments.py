"""Optimizer state that lies in the next tier of memory between updates, one fragment a bucket.

A fragment in memory lies in one of a few blocks that all fragments share, so that the memory they take is bounded by
construction and a steady step allocates nothing. While it is out, its tensors are on the meta device: what they are
is known, what they hold is not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import TierError
from weft.state.layout import ALIGNMENT, Layout, round_up
from weft.state.optimizer import BucketOptimizer, Segment
from weft.state.shards import BucketState, return_freed_memory
from weft.state.tiers import SECTOR, Pending, Tier, aligned_block


@dataclass(eq=False)
class Block:
    """Memory for one fragment at a time."""

    memory: torch.Tensor
    leaving: Pending | None = None  # the write of what it held last


class Fragment:
    """One bucket's optimizer state.

    Each kind of state (exp_avg, ...) has room for the bucket's whole owned range, one behind the other, so a segment's
    place does not depend on how the bucket is cut into segments at the moment.
    """

    def __init__(self, owner: Fragments, key: int, name: str, optimizer: BucketOptimizer) -> None:
        self.owner, self.key, self.name, self.optimizer = owner, key, name, optimizer
        self.places: dict[tuple[str, torch.dtype], int] = {}  # a kind's offset in bytes
        self.nbytes = 0
        self.block: Block | None = None
        self.arriving: Pending | None = None
        self.kept: Pending | None = None  # the last write, perhaps still under way
        self.changed = False

    # ---- what the step does ----

    def reload(self) -> None:
        """Start to bring the state into a free block; before the first update there is none, and the block is all."""
        self.owner.release_read()
        assert self.block is None, f"{self.name} is in memory already"
        self.block = block = self.owner.take(self.nbytes)
        before = [pending for pending in (block.leaving, self.kept) if pending is not None]
        if self.nbytes and self.kept is not None:
            self.arriving = self.owner.tier.read(self.key, block.memory[: self.nbytes], before)
        else:
            self.arriving = block.leaving

    def await_reload(self) -> None:
        assert self.block is not None, f"{self.name} was not reloaded"
        if self.arriving is not None:
            self.owner.wait(self.arriving.wait, f"the optimizer state of {self.name} to be read from")
            self.arriving = None
        self.block.leaving = None
        for segment, state in self._states():
            for key, value in state.items():
                if is_out(value):
                    state[key] = self._place(key, value.dtype, segment)

    def offload(self) -> None:
        """Start to write the state out, if an update changed it, and give the block up."""
        assert self.block is not None, f"{self.name} is not in memory"
        if self.changed:
            if self._pack():
                return_freed_memory()  # or the allocator keeps what all first updates took
            if self.nbytes:
                earlier = [] if self.kept is None else [self.kept]
                self.kept = self.owner.tier.write(self.key, self.block.memory[: self.nbytes], earlier)
                self.block.leaving = self.kept
            self.changed = False
        for _, state in self._states():
            for key, value in state.items():
                if elementwise(value):
                    state[key] = torch.empty(value.numel(), dtype=value.dtype, device="meta")
        self.owner.give(self.block)
        self.block = None

    # ---- what happens between steps ----

    def put_out(self) -> None:
        """Write out a state that was put in the place of the old one, in memory of its own."""
        if self.block is not None:  # only because the old state was read last
            assert self.owner.read_last is self, f"{self.name} is in a block"
            self.owner.read_last = None
            self.owner.give(self.block)
        self.places, self.nbytes, self.changed = {}, 0, True
        self.block = block = self.owner.take(0)
        if block.leaving is not None:
            self.owner.wait(block.leaving.wait, f"a block of memory, which {self.name} needs, to be written to")
        self.offload()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """The state, to be read."""
        if self.block is not None:
            yield
            return
        self.reload()
        try:
            self.await_reload()
            yield
        finally:
            self.offload()

    def later(self, parameter: int, key: str, start: int, stop: int) -> Callable[[], torch.Tensor]:
        """A part of a parameter's state, read when it is asked for and good until another fragment's is."""

        def values() -> torch.Tensor:
            self.owner.bring(self)
            return self.optimizer.export_state()[parameter][key][start:stop]

        return values

    # ---- how it lies in a block ----

    def _states(self) -> Iterator[tuple[Segment, dict[str, Any]]]:
        for segment in self.optimizer.segments:
            if segment.tensor in self.optimizer.twin.state:
                yield segment, self.optimizer.twin.state[segment.tensor]

    def _place(self, key: str, dtype: torch.dtype, segment: Segment) -> torch.Tensor:
        assert self.block is not None
        start = self.places[key, dtype]
        stop = start + self.optimizer.master.numel() * dtype.itemsize
        return self.block.memory[start:stop].view(dtype)[segment.start : segment.stop]

    def _pack(self) -> bool:
        """Copy what is not in the block yet: a state's first values, and what the optimizer or a split made anew.

        Returns whether there was such.
        """
        assert self.block is not None
        end = self.nbytes
        for _, state in self._states():
            for key, value in state.items():
                if elementwise(value) and (key, value.dtype) not in self.places:
                    self.places[key, value.dtype] = end
                    end += round_up(self.optimizer.master.numel() * value.dtype.itemsize, ALIGNMENT)
        self.nbytes = round_up(end, SECTOR)
        self.owner.grow(self.block, self.nbytes)
        copied = False
        for segment, state in self._states():
            for key, value in state.items():
                if elementwise(value):
                    place = self._place(key, value.dtype, segment)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                        state[key] = place
                        copied = True
        return copied


class Fragments:
    """Everything of a rank that is offloaded, and the blocks through which it comes and goes."""

    def __init__(
        self, layout: Layout, tier: Tier, *, device: torch.device, state_elements: float, timeout: float
    ) -> None:
        self.tier, self.device, self.timeout = tier, device, timeout
        self.of: dict[int, Fragment] = {}
        sizes = [layout.fragment_bytes(bucket, state_elements) for bucket in layout.offloaded]
        # Of the sizes that are to be expected; an optimizer that keeps more than it did in its trial makes them grow.
        self.block_bytes = round_up(math.ceil(max(sizes)), SECTOR)
        self.free: deque[Block] = deque()
        self.unused = min(layout.offload_window, len(sizes))  # blocks that nobody has needed yet
        self.read_last: Fragment | None = None  # brought in for `later`

    def add(self, held: BucketState) -> None:
        """Offload a bucket's state from now on, with what there is of it."""
        assert held.optimizer is not None
        index = held.bucket.index
        held.fragment = self.of[index] = Fragment(self, index, held.bucket.describe(), held.optimizer)
        held.fragment.put_out()

    def take(self, nbytes: int) -> Block:
        """The block that has been free for longest."""
        self.release_read()
        if self.unused:
            self.unused -= 1
            self.free.append(Block(aligned_block(self.block_bytes, self.device)))
            self.free.rotate(1)
        assert self.free, "more fragments are in memory than the layout's window"
        block = self.free.popleft()
        self.grow(block, nbytes)
        return block

    def grow(self, block: Block, nbytes: int) -> None:
        if block.memory.numel() < nbytes:
            self.block_bytes = max(self.block_bytes, nbytes)
            if block.leaving is not None:
                self.wait(block.leaving.finish, "a block of memory to be written to")
            block.memory = aligned_block(nbytes, self.device)

    def give(self, block: Block) -> None:
        self.free.append(block)

    def bring(self, fragment: Fragment) -> None:
        """Have a fragment in memory, instead of the one that was brought before."""
        if self.read_last is not fragment:
            self.release_read()
            fragment.reload()
            self.read_last = fragment
            fragment.await_reload()

    def release_read(self) -> None:
        fragment, self.read_last = self.read_last, None
        if fragment is not None:
            fragment.offload()

    def wait(self, wait: Callable[[float], bool], what: str) -> None:
        if not wait(self.timeout):
            raise TierError(
                f"waited {self.timeout:g} s for {what} {self.tier.describe()}, and it is still under way: the disk is "
                "too slow or does not answer. Raise timeout=, or name another folder with offload=..."
            )

    def drain(self) -> None:
        """Wait until everything that goes out is out."""
        self.release_read()
        for fragment in self.of.values():
            if fragment.kept is not None:
                self.wait(fragment.kept.finish, f"the optimizer state of {fragment.name} to be written to")

    def close(self) -> None:
        self.tier.close()


def elementwise(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def is_out(value: Any) -> bool:
    """Whether a tensor of the state has its values elsewhere."""
    return elementwise(value) and value.is_meta
