"""Real processes for distributed tests: started once for a world size, given functions to run, killed if they hang."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

START_TIMEOUT = 120.0


def _serve(rank: int, world: int, store: str, tasks: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Measuring takes seconds and the machine is busy; tests of measuring turn it on.
    os.environ.setdefault("WEFT_MEASURE", "0")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    results.put((rank, True, None))
    while True:
        task = tasks.get()
        if task is None:
            dist.destroy_process_group()
            return
        function, args, kwargs = task
        try:
            results.put((rank, True, function(rank, *args, **kwargs)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


class Ranks:
    """`world` processes in one gloo group. `run(f, ...)` calls `f(rank, ...)` in each and returns their results."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        directory = tempfile.mkdtemp(prefix="weft-ranks-")
        self.tasks = [context.Queue() for _ in range(self.world)]
        self.results = context.Queue()
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, self.world, os.path.join(directory, "store"), self.tasks[rank], self.results),
                daemon=True,
            )
            for rank in range(self.world)
        ]
        for process in self.processes:
            process.start()
        self._collect(START_TIMEOUT)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for tasks in self.tasks:
            tasks.put((function, args, kwargs))
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while len(answers) < self.world:
            try:
                rank, good, value = self.results.get(timeout=0.2)
            except queue.Empty:
                dead = [i for i, p in enumerate(self.processes) if not p.is_alive() and i not in answers]
                if dead or time.monotonic() > deadline:
                    self.kill()
                    what = f"ranks {dead} died" if dead else f"no answer within {timeout} s"
                    raise AssertionError("\n".join([what, *failures])) from None
                continue
            answers[rank] = value
            if not good:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + 90)  # the others may be waiting for it
        if failures:
            self.kill()
            raise AssertionError("\n".join(failures))
        return [answers[rank] for rank in range(self.world)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def stop(self) -> None:
        for tasks in self.tasks if self.processes else ():
            tasks.put(None)
        for process in self.processes:
            process.join(timeout=10)
        self.kill()
