"""A rank that stops, raises or is killed ends the others, soon and with an error that says who waited for what."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parent.parent.parent
TIMEOUT = 8  # seconds that a rank waits for another
SCRIPT = """
import os, signal, sys
import torch
import weft
from torch import nn

mode, what, timeout = sys.argv[1:]
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

def loss(model, batch):
    if batch.shape[0] == 5:
        raise KeyError("a column that is missing in this shard")
    return model(batch).square().mean()

step = weft.compile(
    model, torch.optim.AdamW(model.parameters()), loss, mode=mode, timeout=int(timeout),
    passes={"shard": {"bucket_bytes": 1500}},
)
for index in range(40):
    odd = rank == 1 and index == 3
    if odd and what == "ends":
        break
    if odd and what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if odd and what == "stalls":
        signal.pause()
    step(torch.randn(5 if odd and what == "raises" else 4, 16))
print("went on to the end", flush=True)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
@pytest.mark.parametrize("what", ["ends", "raises", "is killed", "stalls"])
def test_a_rank_that_is_gone_ends_the_others_within_the_timeout(tmp_path: Path, mode: str, what: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), mode, what, str(TIMEOUT)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        if what == "stalls":
            started[0].wait(timeout=90)
            started[2].wait(timeout=TIMEOUT + 10)
            started[1].kill()
        else:
            started[1].wait(timeout=90)
            left = time.monotonic() + TIMEOUT + 10
            for rank in (0, 2):
                started[rank].wait(timeout=max(0.1, left - time.monotonic()))
        for rank in (0, 2):
            output, errors = started[rank].communicate()
            assert started[rank].returncode == 1, errors
            assert "went on" not in output
            assert f"PeerError: rank {rank} waited for ranks" in errors
            assert "bucket" in errors or "which parameters were reached" in errors
        if what == "raises":
            assert "KeyError: 'a column that is missing in this shard'" in started[1].communicate()[1]
    finally:
        for process in started:
            process.kill()
            process.communicate()
