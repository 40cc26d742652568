"""Run a training script on every host of a lab, by torchrun as on a real cluster; show what each host prints."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from weft.lab.cluster import Lab, Shape, signal_command
from weft.lab.errors import LabError

PORT = 29500
GRACE = 15.0  # seconds that hosts have to end by themselves once one has failed, or after Ctrl-C


def torchrun(command: Sequence[str], *, lab: Lab, host: int, processes: int) -> list[str]:
    """The command as torchrun starts it on one host: `python script ...`, `python -m module ...` or a program."""
    command = list(command)
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    place = ["--nnodes", str(lab.shape.hosts), "--node-rank", str(host), "--nproc-per-node", str(processes)]
    meeting = ["--master-addr", lab.network.address(0), "--master-port", str(PORT)]
    name = command[0].rsplit("/", 1)[-1]
    if name.startswith("python") and len(command) > 1:
        if "/" in command[0]:
            launcher[0] = command[0]
        command[0] = launcher[0]  # a plain "python" is the one that weft is installed for
        script = command[1:] if command[1] == "-m" or not command[1].startswith("-") else ["--no-python", *command]
    elif command[0].endswith(".py"):
        script = command
    else:
        script = ["--no-python", *command]
    return [*launcher, *place, *meeting, *script]


def run_script(command: Sequence[str], shape: Shape, processes: int = 1) -> int:
    """Run to the end; the exit code is that of the first host to fail."""
    if not command:
        raise LabError("there is nothing to run: weft lab --hosts 2 --gbit 1 -- python train.py")
    with Lab(shape) as lab:
        print(f"lab: {shape.describe()}", flush=True)
        environment = {"PYTHONUNBUFFERED": "1"}
        running = [
            lab.start(
                host,
                torchrun(command, lab=lab, host=host, processes=processes),
                environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host in range(shape.hosts)
        ]
        readers = [_show(process.stdout, f"host{host} | ") for host, process in enumerate(running)]
        code = _wait(lab, running)
        for reader in readers:
            reader.join(timeout=5)
        for host, group in enumerate(lab.groups):
            if group.kills():
                assert shape.memory is not None
                limit = f"{shape.memory / 2**30:.2f} GiB"
                print(f"lab: host{host} passed its memory limit of {limit}, and its process was killed", flush=True)
    return code


def _wait(lab: Lab, running: list[subprocess.Popen[Any]]) -> int:
    """Wait until all hosts ended, or for a short while after the first failed or the user asked to stop."""
    deadline, first = float("inf"), 0
    stopping = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while None in (codes := [process.poll() for process in running]):
            first = first or next((code for code in codes if code), 0)
            if (first or stopping.is_set()) and deadline == float("inf"):
                deadline = time.monotonic() + GRACE
                for process in running if stopping.is_set() else ():
                    signal_command(process, signal.SIGINT)
            if time.monotonic() > deadline:
                lab.kill()
            time.sleep(0.05)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    first = first or next((p.returncode for p in running if p.returncode), 0)
    # A process that a signal ended has a negative code; shells say 128 + signal.
    return 128 - first if first < 0 else first or (130 if stopping.is_set() else 0)


def _show(source: IO[bytes] | None, prefix: str) -> threading.Thread:
    """Pass a host's output on, line by line, the host's name before each."""
    assert source is not None

    def copy() -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\r\n")
                # Read on when nobody listens any more (`| head`): a full pipe would stop the host.
                with suppress(BrokenPipeError):
                    sys.stdout.write(f"{prefix}{text}\n")
                    sys.stdout.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread
