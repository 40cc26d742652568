"""One rank of one contestant, on a host of the lab: does what `benchmarks.rounds` asks for, line by line.

    python -m benchmarks.worker PEER SETTINGS WORKLOAD SIZE WORK RANK WORLD ADDRESS

It reads one JSON request a line from standard input and answers with a line that starts with ANSWER; everything else
that a peer prints is for the error message, should it fail. It ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import PEERS, REFERENCES, CannotRun, Contestant
from benchmarks.workloads import Work, workload

ANSWER = "@@answer "
TIMEOUT = timedelta(seconds=120)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Worker:
    def __init__(
        self, rank: int, peer: str, settings: dict[str, Any], name: str, size: str, work: dict[str, Any]
    ) -> None:
        self.workload, self.work = workload(name, size), Work(**work)
        self.build_contestant = (PEERS | REFERENCES)[peer].builder(settings)
        self.rank = rank
        self.contestant: Contestant | None = None
        self.data = torch.Generator()
        # What Python, PyTorch and the peer's own imports take is not the training's memory.
        self.before = status("VmRSS")

    def build(self, dropout: float) -> dict[str, Any]:
        """A new model from the one seed, and the contestant on it."""
        self.contestant = None
        self.data.manual_seed(1000 + self.rank)
        torch.manual_seed(7)
        model = self.workload.build(dropout)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.contestant = self.build_contestant(model, self.workload, self.work)
        return {"parameters": parameters}

    def steps(self, count: int) -> dict[str, Any]:
        """So many steps on new data; the clock stops when nothing is in flight on any rank."""
        assert self.contestant is not None
        batches = [[self.workload.batch(self.data) for _ in range(self.work.accumulate)] for _ in range(count)]
        losses = []
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            losses.append(self.contestant.step(batch))
        self.contestant.finish()
        dist.barrier()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        passes = getattr(self.contestant, "passes_a_step", None)
        return {"seconds": seconds, "cpu": cpu, "losses": [loss.item() for loss in losses], "passes": passes}

    def reset_memory(self) -> dict[str, Any]:
        Path("/proc/self/clear_refs").write_text("5")
        return {}

    def memory(self) -> dict[str, Any]:
        """The most that this process had since the reset, beyond what its imports take."""
        return {"bytes": status("VmHWM") - self.before}


def join(rank: int, world: int, address: str) -> None:
    """The process group of all hosts; compute has one thread a host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=TIMEOUT)


def serve(worker: object) -> None:
    """Answer requests, which are method calls, until there are no more."""
    print(f"{ANSWER}{{}}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except CannotRun as error:
            answer = {"cannot": str(error)}
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            answer = {"cannot": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def main() -> None:
    peer, settings, name, size, work, rank, world, address = sys.argv[1:]
    join(int(rank), int(world), address)
    serve(Worker(int(rank), peer, json.loads(settings), name, size, json.loads(work)))


if __name__ == "__main__":
    main()
