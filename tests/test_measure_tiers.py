"""Copies to the next tier of memory are timed, leave nothing behind, and say why where they cannot be made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from weft.errors import TierError
from weft.measure import tiers
from weft.measure.tiers import TierTimes, measure_tier

CPU = torch.device("cpu")
MEGA = 1 << 20


def test_a_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    found = measure_tier(tmp_path, CPU, 10 * MEGA)
    assert list(tmp_path.iterdir()) == []
    assert found.write_bytes_per_second > MEGA
    assert found.read_bytes_per_second > MEGA
    assert 0 < found.latency < 1
    assert TierTimes.from_json(found.to_json()) == found


def test_a_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode)

    monkeypatch.setattr(tiers.os, "open", refuse)
    assert measure_tier(tmp_path, CPU, MEGA).read_bytes_per_second > MEGA
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"folder .*/nowhere: No such file or directory\. Give one that exists"):
        measure_tier(tmp_path / "nowhere", CPU, MEGA)


def test_a_folder_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tiers.os, "posix_fallocate", full)
    with pytest.raises(TierError, match="No space left on device"):
        measure_tier(tmp_path, CPU, MEGA)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_at_all() -> None:
    with pytest.raises(TierError, match="no folder is given"):
        measure_tier(None, CPU)
    with pytest.raises(ValueError, match="bytes=0"):
        measure_tier(None, CPU, 0)
