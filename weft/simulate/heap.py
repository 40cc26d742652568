"""How much of glibc's heap a program's values take: more than their bytes, since freed blocks do not fit new ones.

PyTorch asks for memory aligned to 64 bytes. glibc searches for a free block that much larger than the request and cuts
its ends off, so a value of the same size as one just freed fits into its place only if a neighbour was free too; the
piece cut off in front mostly goes to some small object and keeps the neighbours apart. This follows the heap through
one run of a program: best fit, neighbours joined, and these two things as they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

HEADER, UNIT, LEAST = 8, 16, 32  # of a block: what malloc writes in front, its granularity, the smallest
ALIGNMENT = 64
# Which of the pieces cut off in front come free again is chance. One in eight, starting with either of three, agrees
# with the heaps of real processes.
JOINED = 8
PHASES = (0, 2, 4)


class Heap:
    """Free blocks by size, and by both ends so that neighbours are found."""

    def __init__(self, phase: int = 0) -> None:
        self.top = 0
        self.most = 0
        self.cuts = phase
        self.free: list[tuple[int, int]] = []  # (bytes, start)
        self.size_at: dict[int, int] = {}
        self.size_before: dict[int, int] = {}

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """A block's start and size."""
        size = max(LEAST, -(-(nbytes + HEADER) // UNIT) * UNIT)
        index = bisect_left(self.free, (size + ALIGNMENT + LEAST, 0))
        found = None
        start = self.top
        if index < len(self.free):
            found, start = self.free[index]
            self._take(found, start)
        front = -(start + UNIT) % ALIGNMENT
        front += ALIGNMENT if 0 < front < LEAST else 0
        if front:
            self.cuts += 1
            if self.cuts % JOINED == 0:
                self._put(start, front)
        start += front
        if found is None:
            self.top = start + size
            self.most = max(self.most, self.top)
        elif found - front - size >= LEAST:
            self._put(start + size, found - front - size)
        else:
            size = found - front
        return start, size

    def release(self, start: int, size: int) -> None:
        before = self.size_before.get(start)
        if before is not None:
            self._take(before, start - before)
            start, size = start - before, size + before
        after = self.size_at.get(start + size)
        if after is not None:
            self._take(after, start + size)
            size += after
        if start + size == self.top:
            self.top = start
        else:
            self._put(start, size)

    def _put(self, start: int, size: int) -> None:
        insort(self.free, (size, start))
        self.size_at[start] = self.size_before[start + size] = size

    def _take(self, size: int, start: int) -> None:
        del self.free[bisect_left(self.free, (size, start))]
        del self.size_at[start], self.size_before[start + size]


def heap_bytes(spans: Iterable[tuple[int, int, int]], length: int) -> int:
    """The most that the heap takes for values of (bytes, first position, last position)."""
    born: list[list[int]] = [[] for _ in range(length)]
    dies: list[list[int]] = [[] for _ in range(length)]
    sizes: list[int] = []
    for number, (nbytes, first, last) in enumerate(spans):
        sizes.append(nbytes)
        born[first].append(number)
        dies[last].append(number)
    return max(_run(Heap(phase), sizes, born, dies) for phase in PHASES)


def _run(heap: Heap, sizes: Sequence[int], born: Sequence[list[int]], dies: Sequence[list[int]]) -> int:
    blocks: dict[int, tuple[int, int]] = {}
    for starting, ending in zip(born, dies, strict=True):
        for number in starting:
            blocks[number] = heap.allocate(sizes[number])
        for number in ending:
            heap.release(*blocks.pop(number))
    return heap.most
