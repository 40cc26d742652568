"""`zero3` holds its share: peak memory of real processes, against `replicate` on the same model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.ranks import Ranks

WIDTH, LAYERS = 1024, 16  # 64 MiB of parameters: much more than the activations, or what Python takes
PARAMETER_BYTES = 4 * WIDTH * WIDTH * LAYERS
BUCKET = 4 * WIDTH * WIDTH  # one layer


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def peak_of_training(rank: int, mode: str) -> tuple[int, int]:
    """Bytes a process has more at the peak of a step, and between steps, than before the model was built."""
    gc.collect()
    warm_up()
    before = status("VmRSS")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = weft.compile(model, optimizer, lambda m, x: m(x).square().mean(), mode=mode, timeout=60)
    x = torch.randn(2, WIDTH)
    step(x)
    step(x)
    gc.collect()
    reset_peak()
    for _ in range(3):
        step(x)
    step.drain()
    return status("VmHWM") - before, status("VmRSS") - before


def warm_up() -> None:
    """Everything that is loaded once, by a step of a small model."""
    model = nn.Linear(8, 8)
    step = weft.compile(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum(), timeout=60)
    step(torch.randn(2, 8))


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_zero3_holds_its_share_and_the_buckets_in_use(world: int) -> None:
    pool = Ranks(world)
    try:
        peaks = {mode: max(peak for peak, _ in pool.run(peak_of_training, mode)) for mode in ("zero3", "replicate")}
    finally:
        pool.stop()
    # Parameters, gradients and two AdamW states, in equal shares.
    share = 4 * PARAMETER_BYTES / world
    working_set = 2 * BUCKET  # gathered: one in use, one ahead
    assert peaks["zero3"] <= 1.05 * (share + working_set), {mode: peak / 2**20 for mode, peak in peaks.items()}
    assert peaks["replicate"] > 3 * PARAMETER_BYTES, "replicate holds everything, or the measurement is off"
