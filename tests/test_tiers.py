"""The tier of files: what is written comes back, requests keep their order, and every failure says what to do."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import TierError
from weft.state import tiers
from weft.state.tiers import PIECE, SECTOR, FileTier, aligned_block, default_folder, file_system

CPU = torch.device("cpu")


def block_of(value: int, nbytes: int) -> torch.Tensor:
    return aligned_block(nbytes, CPU).fill_(value)


def numbers(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    block = aligned_block(nbytes, CPU)
    return block.copy_(torch.randint(0, 256, (block.numel(),), generator=generator, dtype=torch.uint8))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_what_was_written_is_read(tmp_path: Path, monkeypatch: Any, direct: bool, named: bool) -> None:
    real = os.open

    def picky(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        """As file systems that need the page cache, or that have no files without a name."""
        if not direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if named and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", picky)
    tier = FileTier(tmp_path)
    assert direct or not tier.direct
    assert not list(tmp_path.iterdir()), "the file has no name"
    sizes = [SECTOR, 3 * PIECE + SECTOR, 5 * SECTOR, PIECE]
    blocks = [numbers(size, seed) for seed, size in enumerate(sizes)]
    for pending in [tier.write(key, block) for key, block in enumerate(blocks)]:
        assert pending.wait(60)
    assert tier.write(2, numbers(9 * SECTOR, 7)).wait(60), "longer than before: somewhere else"
    found = [block_of(0, size) for size in sizes]
    found[2], blocks[2] = block_of(0, 9 * SECTOR), numbers(9 * SECTOR, 7)
    for pending in [tier.read(key, block) for key, block in enumerate(found)]:
        assert pending.wait(60)
    assert all(torch.equal(one, other) for one, other in zip(found, blocks, strict=True))
    tier.close()


def test_a_request_comes_after_those_that_it_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    tier = FileTier(tmp_path)
    assert tier.write(1, block_of(1, 2 * PIECE)).wait(60)
    go, real = threading.Event(), os.pwritev

    def held_up(*arguments: Any) -> int:
        go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", held_up)
    block = block_of(2, 2 * PIECE)
    write = tier.write(2, block)
    read = tier.read(1, block, [write])  # into the memory that is being written
    again = tier.read(2, block_of(0, 2 * PIECE), [read, write])
    assert not again.wait(0.1)
    assert bool((block == 2).all()), "nothing is read before the write is done"
    go.set()
    assert again.wait(60)
    assert bool((block == 1).all())


def test_a_full_disk_is_an_error_that_names_the_folder_and_what_to_do(tmp_path: Path, monkeypatch: Any) -> None:
    tier = FileTier(tmp_path)
    real = os.pwritev

    def full(descriptor: int, buffers: Sequence[Any], position: int) -> int:
        if position >= PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "pwritev", full)
    block = block_of(1, 3 * PIECE)
    write = tier.write(0, block)
    with pytest.raises(TierError, match=r"No space left on device \(\d+ bytes are free\).*offload=") as caught:
        write.wait(60)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(TierError, match="cannot write optimizer state to"):
        tier.read(0, block, [write]).wait(60)
    monkeypatch.undo()
    assert tier.write(0, block).wait(60), "one failure does not stop the threads"


def test_a_short_read_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    tier = FileTier(tmp_path)
    assert tier.write(0, block_of(1, SECTOR)).wait(60)
    monkeypatch.setattr(os, "preadv", lambda *arguments: 0)
    with pytest.raises(TierError, match=f"cannot read optimizer state from.*0 bytes instead of {SECTOR}"):
        tier.read(0, block_of(0, SECTOR)).wait(60)


def test_short_transfers_are_finished(tmp_path: Path, monkeypatch: Any) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real(fd, [buffers[0][:SECTOR]], at))
    tier = FileTier(tmp_path)
    block, found = numbers(6 * SECTOR, 1), block_of(0, 6 * SECTOR)
    assert tier.write(0, block).wait(60)
    assert tier.read(0, found).wait(60)
    assert torch.equal(block, found)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path: Path, monkeypatch: Any, error: int) -> None:
    def refuse(*arguments: Any, **more: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TierError, match=os.strerror(error)) as caught:
        FileTier(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file or directory"):
        FileTier(tmp_path / "nowhere")


def test_an_abandoned_tier_gives_up_its_threads_and_its_file(tmp_path: Path) -> None:
    def ours() -> int:
        return sum(thread.name.startswith("weft.tier") for thread in threading.enumerate())

    gc.collect()
    time.sleep(0.1)
    before, files = ours(), len(os.listdir("/proc/self/fd"))
    tier = FileTier(tmp_path)
    assert tier.write(0, block_of(1, SECTOR)).wait(60)
    assert ours() == before + tiers.THREADS
    del tier
    gc.collect()
    deadline = time.monotonic() + 10
    while ours() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ours() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_the_default_folder_is_on_a_disk_or_the_one_that_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("WEFT_OFFLOAD_DIR", raising=False)
    assert default_folder().is_dir()
    kinds = {tmp_path: "tmpfs"}
    monkeypatch.setattr(tiers, "file_system", lambda folder: kinds.get(folder, "ext4"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert default_folder() == Path("/var/tmp"), "what is in memory anyway saves no memory"
    monkeypatch.setenv("WEFT_OFFLOAD_DIR", str(tmp_path))
    assert default_folder() == tmp_path


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system")
def test_the_kind_of_file_system_is_known() -> None:
    assert file_system(Path("/dev/shm")) == "tmpfs"
