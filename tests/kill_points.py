"""Kill trainings at random moments, start them again, and see that they end as if nothing had happened.

    python -m tests.kill_points --count 50 --seed 0

Each point is a small training on two or three processes that saves all the time, in the background or not. At a random
moment, saves included, one random rank gets SIGKILL; the others must end by themselves, with an error and without
hanging, and everything is started again. The loss curve and the final parameters must be those of an undisturbed run,
bit for bit, and a start must find the last checkpoint that was finished, or a newer one.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from tests.models import CASES, batches, build

STEPS, EVERY = 18, 2
TIMEOUT = 10.0  # seconds: of the ranks' waits for each other
# Seconds after which a process that has not ended hangs. While a job starts, and the rank that keeps its store is gone,
# PyTorch's own rendezvous tries for two and a half times the timeout before it gives up.
HANGS = 60.0


@dataclass(frozen=True)
class Setting:
    world: int
    mode: str
    background: bool


def train(rank: int, port: int, setting: Setting, folder: Path) -> None:
    """What a rank does: go on from the checkpoint if there is one, and write its results to a file."""
    torch.set_num_threads(1)
    sys.stderr = open(folder / f"stderr-{rank}", "a")  # noqa: SIM115  (to the end of the process)
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.dump_traceback_later(HANGS - 5, file=sys.stderr)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(setting.world))
    model = build("tied_gpt", torch.float32)
    optimizer = CASES["tied_gpt"].optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    passes = {"shard": {"bucket_bytes": 2000}}
    step = weft.compile(model, optimizer, mode=setting.mode, seed=5, passes=passes, timeout=TIMEOUT)
    checkpoint, finished = folder / "checkpoint", folder / "finished-saves"
    losses: list[float] = []
    if (checkpoint / "checkpoint.json").exists():
        extra = weft.load(step, checkpoint)
        schedule.load_state_dict(extra["schedule"])
        losses = extra["losses"]
        known = finished.read_text().split() if finished.exists() else []
        assert step.steps == len(losses), "the checkpoint mixes two saves"
        assert step.steps >= max(map(int, known), default=0), "an older checkpoint than the last that was finished"
    while step.steps < STEPS:
        loss = step(batches("tied_gpt", rank, step.steps, 1, torch.float32)[0])
        losses.append(loss.item())
        schedule.step()
        if step.steps % EVERY == 0:
            extra = {"schedule": schedule.state_dict(), "losses": losses}
            handle = weft.save(step, checkpoint, extra=extra, background=setting.background)
            if rank == 0 and handle.done():
                with open(finished, "a") as file:
                    file.write(f"{step.steps} ")
    handle = weft.save(step, checkpoint, extra={"schedule": schedule.state_dict(), "losses": losses})
    with step.gathered():
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = {"losses": losses if rank == 0 else [], "parameters": hashlib.sha256(values).hexdigest()}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


class Attempt:
    """One start of all ranks."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        # Forked, so that a start takes no time: torch and weft are imported once, by this process.
        context = mp.get_context("fork")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            context.Process(target=train, args=(rank, port, setting, folder)) for rank in range(setting.world)
        ]
        self.started = time.monotonic()
        for process in self.processes:
            process.start()

    def wait(self) -> list[int | None]:
        """Exit codes; None for a process that hangs (and is killed then)."""
        deadline = time.monotonic() + HANGS
        codes: list[int | None] = []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def results(setting: Setting, folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(setting.world)]


def undisturbed(setting: Setting) -> tuple[list[dict[str, Any]], float]:
    """What must come out, and how long a run takes."""
    with tempfile.TemporaryDirectory(prefix="weft-kill-") as name:
        folder = Path(name)
        attempt = Attempt(setting, folder)
        codes = attempt.wait()
        told = "".join(path.read_text() for path in folder.glob("stderr-*"))
        assert codes == [0] * setting.world, f"the undisturbed run of {setting} ended with {codes}\n{told}"
        return results(setting, folder), time.monotonic() - attempt.started


def killed(setting: Setting, expected: list[dict[str, Any]], seconds: float, draw: random.Random) -> str | None:
    """One kill point: what went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="weft-kill-") as name:
        folder = Path(name)
        for _ in range(draw.randint(1, 2)):
            attempt = Attempt(setting, folder)
            time.sleep(draw.uniform(0.2, 1.0) * seconds)
            attempt.kill(draw.randrange(setting.world))
            if None in attempt.wait():
                return "a rank hung after another was killed" + _told(folder)
        codes = Attempt(setting, folder).wait()
        if codes != [0] * setting.world:
            return f"the restart ended with {codes}" + _told(folder)
        for rank, (found, wanted) in enumerate(zip(results(setting, folder), expected, strict=True)):
            if found != wanted:
                return f"rank {rank} ended with other numbers" + _told(folder)
        left = [path.name for path in (folder / "checkpoint").iterdir()]
        return None if len(left) == 2 else f"left-overs in the checkpoint: {left}"


def _told(folder: Path) -> str:
    return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("stderr-*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    known: dict[Setting, tuple[list[dict[str, Any]], float]] = {}
    failures, started = 0, time.monotonic()
    for point in range(args.count):
        setting = Setting(
            draw.choice([2, 2, 3]), draw.choice(["replicate", "zero1", "zero2", "zero3"]), draw.random() < 0.5
        )
        if setting not in known:
            known[setting] = undisturbed(setting)
        problem = killed(setting, *known[setting], draw)
        failures += problem is not None
        print(f"{point + 1:3d} {setting}: {problem or 'as undisturbed'}", flush=True)
    seconds = time.monotonic() - started
    print(f"{args.count - failures} of {args.count} kill points ended as if undisturbed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
