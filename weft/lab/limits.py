"""Memory limits and process lists of emulated hosts: one control group each, version 1 or 2."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from weft.lab.errors import LabError

CGROUPS = Path("/sys/fs/cgroup")


def root() -> Path:
    """Where groups with a memory controller are made."""
    if (CGROUPS / "memory" / "cgroup.procs").exists():
        return CGROUPS / "memory"
    if "memory" in _words(CGROUPS / "cgroup.controllers"):
        return CGROUPS
    raise LabError("this machine has no memory control groups (neither version 1 nor 2): a lab needs them")


class Group:
    """One host's control group: its processes, and their memory together."""

    def __init__(self, name: str, host: str) -> None:
        self.lab = root() / name
        self.path = self.lab / host
        self.legacy = self.lab.parent.name == "memory"

    @property
    def processes(self) -> Path:
        return self.path / "cgroup.procs"

    def create(self, memory: int | None) -> None:
        try:
            self.lab.mkdir(exist_ok=True)
            if not self.legacy:
                for parent in (CGROUPS, self.lab):
                    (parent / "cgroup.subtree_control").write_text("+memory")
            self.path.mkdir()
        except OSError as error:
            raise LabError(f"the control group {self.path} cannot be made: {error}") from error
        if memory is None:
            return
        if self.legacy:
            (self.path / "memory.limit_in_bytes").write_text(str(memory))
            _write_if_there(self.path / "memory.memsw.limit_in_bytes", str(memory))
        else:
            (self.path / "memory.max").write_text(str(memory))
            _write_if_there(self.path / "memory.swap.max", "0")

    def kills(self) -> int:
        """How many processes were killed for passing the limit."""
        name = "memory.oom_control" if self.legacy else "memory.events"
        for line in (self.path / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def peak(self) -> int:
        """The most memory that the host's processes had together, file cache included."""
        name = "memory.max_usage_in_bytes" if self.legacy else "memory.peak"
        return int((self.path / name).read_text())


def delete(name: str) -> None:
    """Kill what runs in a lab's groups and remove them."""
    lab = root() / name
    if not lab.exists():
        return
    deadline = time.monotonic() + 10
    for group in [*(path for path in lab.iterdir() if path.is_dir()), lab]:
        while True:
            for process in _words(group / "cgroup.procs"):
                _kill(int(process))
            try:
                group.rmdir()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LabError(f"the control group {group} cannot be removed: {error}") from error
                time.sleep(0.05)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _write_if_there(path: Path, value: str) -> None:
    if path.exists():
        path.write_text(value)
