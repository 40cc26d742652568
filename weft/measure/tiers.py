"""Measures copies to and from the next tier of memory: files on a CPU device, pinned host memory on a GPU.

Files are written and read past the page cache where the file system allows it, from page-aligned memory, in requests of
some MB by a few threads: as optimizer state will be.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.errors import TierError

REQUEST = 8 << 20  # bytes that a thread writes or reads at once
THREADS = 4
PAGE = 4096  # what direct requests are multiples of
REPEATS = 3
SMALL_READS = 16


@dataclass(frozen=True)
class TierTimes:
    """What copies to and from a tier take.

    Attributes:
        latency: seconds of a small copy back.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    latency: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TierTimes:
        return TierTimes(
            write_bytes_per_second=float(value["write_bytes_per_second"]),
            read_bytes_per_second=float(value["read_bytes_per_second"]),
            latency=float(value["latency"]),
        )


def measure_tier(folder: str | os.PathLike[str] | None, device: torch.device, bytes: int = 64 << 20) -> TierTimes:
    """The times of a device's next tier; `folder` is where a CPU device's files go, a GPU needs none.

    Args:
        bytes: how much is copied each way.
    """
    if bytes < 1:
        raise ValueError(f"bytes={bytes}: how much to copy must be above 0, for instance the default of 64 MiB")
    if device.type == "cuda":
        return _measure_pinned(device, bytes)
    if folder is None:
        raise TierError(
            f"state of a model on {device} is offloaded to files, and no folder is given: pass offload=<a folder on a "
            'disk with room>, or offload="off"'
        )
    path = Path(folder)
    try:
        with _Scratch(path, -(-bytes // REQUEST) * REQUEST) as scratch:
            return scratch.measure()
    except OSError as error:
        raise TierError(
            f"cannot offload to the folder {path}: {error.strerror or error}. Give one that exists, may be written to "
            f'and has room (this test takes {bytes / 2**20:g} MiB) with offload=<folder>, or pass offload="off"'
        ) from error


class _Scratch:
    """A file that is gone from its folder as soon as it is open, so that nothing is left whatever happens."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size, self.direct = size, True
        handle, name = tempfile.mkstemp(prefix=".weft-tier-", dir=folder)
        try:
            try:
                self.file = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                self.direct = hasattr(os, "O_DIRECT")
            except OSError:  # this file system always caches
                self.file, self.direct = os.dup(handle), False
        finally:
            os.close(handle)
            os.unlink(name)
        self.memory = threading.local()

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)

    def measure(self) -> TierTimes:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file, 0, self.size)  # a full disk says so here
        with ThreadPoolExecutor(THREADS) as threads:
            # The first round writes to places that the file system has yet to find; later ones, as in training, do not.
            writes = [self._everywhere(threads, self._write) for _ in range(REPEATS)][1:]
            reads = []
            for _ in range(REPEATS):
                self._forget()
                reads.append(self._everywhere(threads, self._read))
        self._forget()
        return TierTimes(self.size / median(writes), self.size / median(reads), median(self._small_reads()))

    def _everywhere(self, threads: ThreadPoolExecutor, request: Callable[[int], None]) -> float:
        """Seconds of a request at each place of the file."""
        started = time.perf_counter()
        for _ in threads.map(request, range(0, self.size, REQUEST)):
            pass
        if not self.direct and request == self._write:
            os.fdatasync(self.file)
        return time.perf_counter() - started

    def _buffer(self) -> memoryview:
        """This thread's memory; a mapping of its own begins at a page, as direct requests must."""
        if not hasattr(self.memory, "view"):
            self.memory.view = memoryview(mmap.mmap(-1, REQUEST))
            self.memory.view[:] = os.urandom(PAGE) * (REQUEST // PAGE)  # disks are quick with zeros
        found: memoryview = self.memory.view
        return found

    def _write(self, offset: int) -> None:
        self._whole(lambda view, at: os.pwritev(self.file, [view], at), self._buffer(), offset)

    def _read(self, offset: int) -> None:
        self._whole(lambda view, at: os.preadv(self.file, [view], at), self._buffer(), offset)

    @staticmethod
    def _whole(move: Callable[[memoryview, int], int], view: memoryview, offset: int) -> None:
        """Go on where the system moved only a part."""
        while view:
            moved = move(view, offset)
            if moved == 0:
                raise OSError("the file ends before what was written to it")
            view, offset = view[moved:], offset + moved

    def _small_reads(self) -> list[float]:
        view, found = self._buffer()[:PAGE], []
        for index in range(SMALL_READS):
            offset = index * (self.size // SMALL_READS) // PAGE * PAGE
            started = time.perf_counter()
            os.preadv(self.file, [view], offset)
            found.append(time.perf_counter() - started)
        return found

    def _forget(self) -> None:
        """Have the page cache drop the file, where it is not passed by."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.fdatasync(self.file)
            with suppress(OSError):
                os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)


def _measure_pinned(device: torch.device, bytes: int) -> TierTimes:
    """Copies between a GPU and pinned host memory, on a stream of their own."""
    try:
        host = torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise TierError(
            f"cannot pin {bytes / 2**20:g} MiB of host memory for offloading: {str(error).splitlines()[0]}. Free host "
            'memory, raise the limit on locked memory (ulimit -l), or pass offload="off"'
        ) from error
    there = torch.empty(bytes, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            started.record(side)
            target.copy_(source, non_blocking=True)
            ended.record(side)
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3

    write = [seconds(host, there) for _ in range(REPEATS + 1)][1:]
    read = [seconds(there, host) for _ in range(REPEATS + 1)][1:]
    small = [seconds(there[:PAGE], host[:PAGE]) for _ in range(SMALL_READS)]
    return TierTimes(bytes / median(write), bytes / median(read), median(small))
