"""A lab: hosts that processes can be started on, made for the length of a `with`, and gone afterwards.

Nothing outlives its owner. Processes die with it: each host has a process namespace of its own, which the kernel ends
when the process that opened it dies, and that one dies with its parent. What is left then (namespaces, control groups)
is removed by the next lab: a lab holds a lock on a file of its name as long as it lives, so an unlocked one is over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.lab import limits, network
from weft.lab.errors import LabError
from weft.lab.network import INTERFACE, MOST_HOSTS, Network

RUN = Path("/run/weft-lab")
PREFIX = "weft"
# On the host: its name, the names of the others, its control group, and then the command itself.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && echo 0 > "$2" && shift 2 && exec "$@"'
NEEDED = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("nsenter", "unshare", "setpriv", "taskset", "mount"), "util-linux"),
    "hostname": "hostname",
}


@dataclass(frozen=True)
class Shape:
    """What a lab looks like.

    Attributes:
        gbit: per host, the speed of its link in each direction, in Gbit/s.
        cores: of each host.
        memory: of each host, in bytes; None: no limit.
        oversubscribe: whether hosts may share cores where the machine has too few.
    """

    gbit: tuple[float, ...]
    cores: int = 1
    memory: int | None = None
    oversubscribe: bool = False

    @property
    def hosts(self) -> int:
        return len(self.gbit)

    def describe(self) -> str:
        speeds = sorted(set(self.gbit))
        rates = f"{speeds[0]:g}" if len(speeds) == 1 else ", ".join(f"{rate:g}" for rate in self.gbit)
        memory = "" if self.memory is None else f", {self.memory / 2**30:.2f} GiB of memory"
        shared = ""
        if self.hosts * self.cores > available_cores():
            shared = f", {available_cores()} real cores shared by all"
        hosts = f"{self.hosts} host" + ("s" if self.hosts > 1 else "")
        return f"{hosts} of {self.cores} core(s){memory}, {rates} Gbit/s each way{shared}"


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def check_machine(shape: Shape) -> None:
    """Raise unless this machine can play the lab."""
    if os.geteuid() != 0:
        raise LabError("a lab makes network namespaces and control groups, which needs root: run it with sudo")
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            raise LabError(f"a lab needs the program {program}: install {package} (Debian: apt-get install {package})")
    wanted, there = shape.hosts * shape.cores, available_cores()
    if wanted > there and not shape.oversubscribe:
        raise LabError(
            f"{shape.hosts} hosts of {shape.cores} core(s) need {wanted} cores and there are {there}: ask for fewer, "
            "or let hosts share cores with --oversubscribe (compute is then slower than on real hosts)"
        )
    if shape.hosts > MOST_HOSTS:
        raise LabError(f"{shape.hosts} hosts: there are addresses for {MOST_HOSTS}")
    if shape.memory is not None and shape.memory < 64 * 2**20:
        raise LabError(f"{shape.memory} bytes of memory a host are too few to start Python in: give at least 64MiB")


class Lab:
    """Emulated hosts. `start` runs a command on one of them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        check_machine(self.shape)
        RUN.mkdir(exist_ok=True)
        remove_abandoned()
        self.name, self._lock = _claim_name()
        self._names = RUN / "hosts" / self.name
        self._names.parent.mkdir(exist_ok=True)
        self.network = Network(self.name, list(self.shape.gbit))
        self.groups = [limits.Group(self.name, f"host{index}") for index in range(self.shape.hosts)]
        try:
            self._names.write_text(self.network.names())
            self.network.create()
            for group in self.groups:
                group.create(self.shape.memory)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        _remove(self.name)
        for process in self.processes:
            process.wait()
        (RUN / self.name).unlink(missing_ok=True)
        os.close(self._lock)

    def kill(self) -> None:
        """End everything that runs on the hosts."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host: in its network, on its cores, within its memory."""
        group = self.groups[host]
        first = host * self.shape.cores
        there = sorted(os.sched_getaffinity(0))
        cores = {there[core % len(there)] for core in range(first, first + self.shape.cores)}
        chain = [
            *("setpriv", "--pdeathsig", "KILL"),
            *("nsenter", f"--net=/run/netns/{self.network.hosts[host]}"),
            *("unshare", "--pid", "--uts", "--fork", "--kill-child=KILL", "--mount-proc"),
            *("taskset", "--cpu-list", ",".join(map(str, sorted(cores)))),
            *("sh", "-c", ENTER, f"host{host}", str(self._names), str(group.processes)),
        ]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.shape.cores),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            **(environment or {}),
        }
        process = subprocess.Popen([*chain, *command], env=variables, start_new_session=True, **options)
        self.processes.append(process)
        return process


def signal_command(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal to the command that `Lab.start` started: the child of the process that opened its namespace."""
    with suppress(OSError, ValueError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), number)


def _claim_name() -> tuple[str, int]:
    for number in range(1000):
        name = f"{PREFIX}{number}"
        if (lock := _lock(RUN / name, os.O_CREAT)) is not None:
            _remove(name)
            return name, lock
    raise LabError(f"there are 1000 labs in {RUN}: remove what is not needed")


def remove_abandoned() -> None:
    """Remove what labs left whose owner was killed."""
    for path in sorted(path for path in RUN.iterdir() if path.is_file()):
        if (lock := _lock(path)) is not None:
            try:
                _remove(path.name)
                path.unlink(missing_ok=True)
            finally:
                os.close(lock)


def _lock(path: Path, flags: int = 0) -> int | None:
    """The lock of a lab's name; None where another lab has it."""
    with suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | flags)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking another lab may have ended and removed the file, and a third made it anew.
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        os.close(lock)
    return None


def _remove(name: str) -> None:
    limits.delete(name)
    network.delete(name)
    (RUN / "hosts" / name).unlink(missing_ok=True)
