"""The next tier of memory, where optimizer state lies between updates: files for a CPU, pinned host memory for a GPU.

A tier moves flat blocks of bytes, each known by a key, in the background. What a request has to come after is given to
it, so that who asks need not wait: a block of memory may be read into as soon as its old contents have been written.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from weft.errors import TierError
from weft.state.layout import round_up

SECTOR = 4096  # bytes; direct input and output want memory, positions and lengths in multiples of it
PIECE = 4 << 20  # bytes that a thread moves at a time
THREADS = 4  # pieces under way together: they wait for the disk, and take next to no processor time
IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files take the memory that is to be saved


class Pending(Protocol):
    """A copy that is under way."""

    def wait(self, timeout: float) -> bool:
        """Until the data is there (on a GPU: for what is launched from now on); False if that takes too long."""

    def finish(self, timeout: float) -> bool:
        """The same, for the host."""


class Tier(Protocol):
    """Keeps blocks of bytes by key. Blocks are uint8, whole sectors long, and their memory is aligned to sectors."""

    def write(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        """Start to keep a block's bytes; it must stay as it is until then. `after`: what has to be done before."""

    def read(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        """Start to bring bytes that were written back, into a block as long as they."""

    def close(self) -> None:
        """Give everything up that is kept."""

    def describe(self) -> str: ...


def make_tier(device: torch.device, folder: Path) -> Tier:
    """The tier next to a device; `folder` is for the one next to a CPU."""
    return FileTier(folder) if device.type == "cpu" else PinnedTier(device)


def aligned_block(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that a tier can move: whole sectors of it."""
    nbytes = round_up(nbytes, SECTOR)
    memory = torch.empty(nbytes + SECTOR, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % SECTOR
    return memory[start : start + nbytes]


# ---- files ----


def default_folder() -> Path:
    """Where files go if the user names no folder: $WEFT_OFFLOAD_DIR, or a temporary folder that is on a disk."""
    named = os.environ.get("WEFT_OFFLOAD_DIR")
    if named:
        return Path(named)
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    on_disk = [folder for folder in folders if folder.is_dir() and file_system(folder) not in IN_MEMORY]
    return (on_disk or folders)[0]


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is in; empty where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    target, best = folder.resolve(), ("", "")
    for line in lines:
        point, kind = line.split(" ")[1:3]
        point = point.encode().decode("unicode_escape")  # blanks are written \040
        # The last mount on a place is the one that is seen there.
        if target.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


class _File:
    """An open file without a name: when the last one who uses it is gone, or killed, so is the file."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = -1
        direct = getattr(os, "O_DIRECT", 0)
        for flags in (direct, 0) if direct else (0,):
            self.direct = bool(flags)
            try:
                self.descriptor = _open_nameless(folder, os.O_RDWR | flags)
                with mmap.mmap(-1, SECTOR) as sector:
                    os.pwritev(self.descriptor, [sector], 0)
                return
            except OSError as error:
                self.__del__()
                if not flags or error.errno != errno.EINVAL:  # EINVAL: this file system cannot do without the cache
                    raise

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def forget(self, start: int, nbytes: int, *, written: bool) -> None:
        """Take what was moved out of the page cache: it counts against a control group's memory."""
        if self.direct or not hasattr(os, "posix_fadvise"):
            return
        if written:
            os.fdatasync(self.descriptor)  # what is not on the disk yet stays in the cache
        os.posix_fadvise(self.descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)


def _open_nameless(folder: Path, flags: int) -> int:
    with suppress(OSError):  # not every file system can
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    path = folder / f".weft-{os.getpid()}-{uuid.uuid4().hex}"
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return descriptor


class _Request:
    """A read or write in pieces; it has ended when all have."""

    def __init__(self, tier: FileTier, action: str) -> None:
        self.folder, self.action = tier.folder, action
        self.pieces: list[_Piece] = []
        self.left = 0
        self.error: Exception | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._next: list[Callable[[], None]] = []

    def wait(self, timeout: float) -> bool:
        if not self._ended.wait(timeout):
            return False
        if self.error is not None:
            raise _described(self.error, self.action, self.folder) from self.error
        return True

    finish = wait

    def ended(self) -> bool:
        return self._ended.is_set()

    def then(self, action: Callable[[], None]) -> None:
        """Call a function when the request has ended, well or not."""
        with self._lock:
            if not self._ended.is_set():
                self._next.append(action)
                return
        action()

    def piece_ended(self, error: Exception | None, count: int = 1) -> None:
        with self._lock:
            self.left -= count
            self.error = self.error or error
            if self.left > 0:
                return
            self.pieces.clear()
            waiting, self._next = self._next, []
            self._ended.set()
        for action in waiting:
            action()


def _described(error: Exception, action: str, folder: Path) -> TierError:
    if isinstance(error, TierError):
        return error
    said = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    free = ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free} bytes are free)"
    return TierError(
        f"cannot {action} {folder}: {said}{free}. Make room there or mend the disk, name another folder with "
        "weft.compile(offload=...) or WEFT_OFFLOAD_DIR, or keep all state in memory with offload='off'"
    )


@dataclass
class _Piece:
    """A stretch of a file and the memory that it goes to or comes from."""

    request: _Request
    file: _File
    memory: memoryview
    position: int
    writes: bool

    def run(self) -> None:
        move = os.pwritev if self.writes else os.preadv
        done = 0
        while done < len(self.memory):  # both may do less than they are asked to
            moved = move(self.file.descriptor, [self.memory[done:]], self.position + done)
            if moved == 0:
                raise OSError(
                    errno.EIO, f"{done} bytes instead of {len(self.memory)} were moved at position {self.position}"
                )
            done += moved
        self.file.forget(self.position, done, written=self.writes)


def _serve(queue: SimpleQueue[_Piece | None]) -> None:
    """A thread's work. It knows the queue alone, so that an abandoned tier goes away."""
    while (piece := queue.get()) is not None:
        error: Exception | None = None
        try:
            if piece.request.error is None:
                piece.run()
        except Exception as caught:  # whatever it is, somebody waits for the piece
            error = caught
        request = piece.request
        del piece
        request.piece_ended(error)
        del request


def _start(queue: SimpleQueue[_Piece | None], request: _Request, after: Sequence[_Request]) -> None:
    """Hand the pieces to the threads when everything that they must come after has ended."""
    for earlier in after:
        if not earlier.ended():
            earlier.then(lambda: _start(queue, request, after))
            return
        if earlier.error is not None:
            request.piece_ended(_described(earlier.error, earlier.action, earlier.folder), request.left)
            return
    for piece in list(request.pieces):
        queue.put(piece)


def _stop(queue: SimpleQueue[_Piece | None]) -> None:
    for _ in range(THREADS):
        queue.put(None)


@dataclass
class FileTier:
    """One file without a name in a folder, read and written past the page cache by a few threads.

    The threads are daemons and the file has no name: a process ends whatever they are at, and leaves nothing behind.
    """

    folder: Path
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)  # key -> where in the file, and how many bytes
    _end: int = 0

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        try:
            self._file = _File(self.folder)
        except OSError as error:
            raise _described(error, "keep optimizer state in", self.folder) from error
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=_serve, args=(self._queue,), name=f"weft.tier {number}", daemon=True).start()
        self._stop = weakref.finalize(self, _stop, self._queue)

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._file.direct

    def write(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        nbytes = block.numel()
        if self._places.get(key, (0, -1))[1] < nbytes:
            self._places[key] = (self._end, nbytes)
            self._end += nbytes
        return self._request(self._places[key][0], block, after, writes=True)

    def read(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        return self._request(self._places[key][0], block, after, writes=False)

    def _request(self, start: int, block: torch.Tensor, after: Sequence[Any], *, writes: bool) -> _Request:
        request = _Request(self, "write optimizer state to" if writes else "read optimizer state from")
        memory = block.numpy().data
        request.pieces = [
            _Piece(request, self._file, memory[offset : offset + PIECE], start + offset, writes)
            for offset in range(0, len(memory), PIECE)
        ]
        request.left = len(request.pieces)
        if request.left:
            _start(self._queue, request, after)
        else:
            request.piece_ended(None)
        return request

    def close(self) -> None:
        self._stop()

    def describe(self) -> str:
        return f"{self.folder} ({'direct' if self.direct else 'through the page cache'})"


# ---- pinned host memory ----


@dataclass
class _Copy:
    """A copy on a stream of its own."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self, timeout: float) -> bool:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return True

    def finish(self, timeout: float) -> bool:
        self.event.synchronize()
        return True


class PinnedTier:
    """Host memory that a GPU copies to and from on its own, one stream a direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {writes: torch.cuda.Stream(device) for writes in (True, False)}
        self._kept: dict[int, torch.Tensor] = {}
        self.close = weakref.finalize(self, _unpin, self._kept)

    def write(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        kept = self._kept.get(key)
        if kept is None or kept.numel() < block.numel():
            if kept is not None:
                torch.cuda.synchronize(self.device)
                _unpin({key: self._kept.pop(key)})
            self._kept[key] = _pinned(block.numel())
        return self._copy(self._kept[key][: block.numel()], block, after, writes=True)

    def read(self, key: int, block: torch.Tensor, after: Sequence[Any] = ()) -> Pending:
        return self._copy(block, self._kept[key][: block.numel()], after, writes=False)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any], *, writes: bool) -> Pending:
        stream = self._streams[writes]
        # What was launched before this may still use the block.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for earlier in after:
            stream.wait_event(earlier.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _Copy(stream.record_event(), self.device)

    def describe(self) -> str:
        return "pinned host memory"


def _pinned(nbytes: int) -> torch.Tensor:
    """Pinned as it is: PyTorch's own pinned memory comes in powers of two."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    failure = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(failure) != 0:
        raise TierError(
            f"cannot pin {nbytes} bytes of host memory for optimizer state: CUDA error {int(failure)}. Offload less, "
            "or raise the limit on locked memory (ulimit -l)"
        )
    return memory


def _unpin(kept: dict[int, torch.Tensor]) -> None:
    with suppress(Exception):  # at the end of the process the driver may be gone already
        torch.cuda.synchronize()
        for memory in kept.values():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    kept.clear()
