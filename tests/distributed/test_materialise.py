"""Models on the meta device over several real processes: the same numbers everywhere, and no rank holds them all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from tests.distributed.test_memory import reset_peak, status
from tests.large import BUILDERS, batch_for, on_meta, values_of
from tests.ranks import Ranks
from weft.state import initial
from weft.state.safetensors import Stored

pytestmark = pytest.mark.distributed

CASES = {
    2: [("everything", "zero2"), ("everything", "replicate"), ("gpt2", "zero3"), ("bert", "zero3")],
    3: [("everything", "zero3"), ("everything", "zero1"), ("llama", "zero3")],
}
SMALL_CHUNK = 200  # elements: parameters have many chunks, and slices end within them
SMALL_BUCKETS = {"shard": {"bucket_bytes": 4000}}


def compiled(model: nn.Module, mode: str, **options: Any) -> weft.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return weft.compile(model, optimizer, mode=mode, seed=5, passes=SMALL_BUCKETS, timeout=60, **options)


def first_values(rank: int, name: str, mode: str, init: Path | None = None) -> dict[str, torch.Tensor]:
    initial.CHUNK, before = SMALL_CHUNK, initial.CHUNK
    try:
        step = compiled(on_meta(name), mode, init=init)
        step.prepare(batch_for(name, rank))
        return values_of(step)
    finally:
        initial.CHUNK = before


def all_first_values(rank: int, world: int) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    return {(name, mode): first_values(rank, name, mode) for name, mode in CASES[world]}


@pytest.mark.parametrize("world", [3, 2])
def test_every_world_and_mode_starts_from_the_same_numbers(ranks: Callable[[int], Ranks], world: int) -> None:
    expected = {name: first_values(0, name, "replicate") for name in dict(CASES[world])}
    for answers in ranks(world).run(all_first_values, world):
        for (name, mode), values in answers.items():
            for key, value in values.items():
                assert torch.equal(value, expected[name][key]), (name, mode, key)


def trained(rank: int, mode: str) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    step = compiled(on_meta("llama"), mode)
    step.prepare(batch_for("llama", rank))
    first = values_of(step)
    losses = [float(step(batch_for("llama", rank + 2 * index)).detach()) for index in range(4)]
    return first, losses, values_of(step)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_it_trains_as_an_eager_model_with_those_values(ranks: Callable[[int], Ranks], mode: str) -> None:
    answers = ranks(2).run(trained, mode)
    model = BUILDERS["llama"]()
    model.load_state_dict(answers[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(4):
        losses = [model(**batch_for("llama", rank + 2 * index)).loss for rank in range(2)]
        assert [float(loss.detach()) for loss in losses] == pytest.approx([a[1][index] for a in answers], rel=1e-5)
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in model.state_dict().items():
        assert torch.allclose(value, answers[1][2][key], atol=1e-6)


def partly_on_meta(rank: int) -> str:
    model = nn.Linear(4, 4, device="meta" if rank else "cpu")
    step = weft.compile(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).sum(), timeout=60)
    with pytest.raises(ValueError, match="compile different steps") as error:
        step(torch.randn(2, 4))
    return str(error.value)


def test_a_model_on_meta_on_some_ranks_alone_is_an_error(ranks: Callable[[int], Ranks]) -> None:
    assert all("on meta on rank 1" in message for message in ranks(2).run(partly_on_meta))


# ---- checkpoints ----


def bytes_and_values(rank: int, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    counts = []
    read = Stored.read

    def counted(self: Stored, start: int = 0, stop: int | None = None) -> torch.Tensor:
        values = read(self, start, stop)
        counts.append(values.nbytes)
        return values

    Stored.read = counted
    try:
        values = first_values(rank, "llama", "zero3", folder)
    finally:
        Stored.read = read
    return sum(counts), values


def test_ranks_read_their_slices_of_a_checkpoint_alone(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    model = BUILDERS["llama"]()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    total = sum(value.nbytes for value in model.state_dict().values())
    answers = ranks(2).run(bytes_and_values, tmp_path)
    assert sum(count for count, _ in answers) == total
    assert all(total * 0.45 < count < total * 0.55 for count, _ in answers)
    for _, values in answers:
        assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())


# ---- memory ----

ROWS, WIDTH = 192 * 1024, 256  # one embedding of 192 MiB, a matrix of 64 MiB and some of 1 MiB


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(8))
        self.head = nn.Linear(WIDTH, 64 * 1024, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.middle:
            x = x + layer(x)[..., :WIDTH]
        return self.head(x).square().mean()


def peak_of_materialising(rank: int) -> tuple[int, int]:
    small = nn.Linear(8, 8, device="meta")  # what is loaded once
    weft.compile(small, torch.optim.AdamW(small.parameters()), lambda m, x: m(x).sum(), timeout=60)(torch.randn(2, 8))
    with torch.device("meta"):
        model = Large()
    step = weft.compile(model, torch.optim.AdamW(model.parameters()), mode="zero3", timeout=60)
    step.prepare((torch.zeros(1, 2, dtype=torch.int64),))
    gc.collect()
    before = status("VmRSS")
    reset_peak()
    executor = step._materialised()
    return status("VmHWM") - before, sum(state.master.nbytes for state in executor.states)


def test_the_peak_of_materialising_is_the_ranks_shards() -> None:
    pool = Ranks(2)
    try:
        answers = pool.run(peak_of_materialising)
    finally:
        pool.stop()
    for peak, shards in answers:
        assert shards == pytest.approx((ROWS + 64 * 1024 + 8 * 4 * WIDTH) * WIDTH * 4 / 2, rel=0.01)
        assert peak < 1.1 * shards, (peak / 2**20, shards / 2**20)
        assert peak > 0.9 * shards, "nothing was filled in, or the measurement is off"


# ---- planning ----


def plan_of(rank: int, mode: str, measured: Path) -> tuple[str, str]:
    plan = compiled(on_meta("gpt2"), mode, cache_dir=measured).prepare(batch_for("gpt2"))
    return plan.explain(), plan.code()


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_a_plan_without_ranks_is_the_one_that_ranks_make(
    ranks: Callable[[int], Ranks], mode: str, tmp_path: Path
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        alone = plan_of(0, mode, tmp_path)
    finally:
        dist.destroy_process_group()
    assert ranks(2).run(plan_of, mode, tmp_path) == [alone, alone]
