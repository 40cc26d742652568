"""The same claims on a GPU: parity with eager, NCCL's collectives, randomness, streams. Skipped without one."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
import weft.api
from tests.models import CASES, TiedGPT, batches, build
from tests.reference import relative_error
from weft.measure.links import measure_links
from weft.measure.load import Load
from weft.measure.tiers import measure_tier
from weft.predict.links import Links
from weft.run.collectives import Nccl
from weft.trace.capture import default_loss

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MODES = ("replicate", "zero1", "zero2", "zero3")
SEED = 3
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def nccl() -> Iterator[Nccl]:
    """NCCL's collectives in a group of one rank: the real calls and waits, on streams."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    group = dist.group.WORLD
    assert group is not None
    yield Nccl(group, timedelta(seconds=60))
    dist.destroy_process_group()


def to_cuda(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, batch)


def train(name: str, mode: str | None, accumulate: int = 1, clip: float | None = None) -> tuple[list[float], nn.Module]:
    """Four steps in fp64 on the GPU; without a mode, plain eager."""
    case = CASES[name]
    model = build(name).cuda()
    optimizer = case.optimizer(model)
    losses = []
    if mode is not None:
        passes = {"shard": {"bucket_bytes": 2000}}
        step = weft.compile(
            model, optimizer, case.loss, mode=mode, accumulate=accumulate, clip_norm=clip, seed=SEED, passes=passes
        )
        for index in range(4):
            data = [to_cuda(batch) for batch in batches(name, 0, index, accumulate)]
            output = step(data if accumulate > 1 else data[0])
            losses.append((output[0] if isinstance(output, tuple) else output).item())
            assert step._executor is not None
            step._executor.poison = True
        with step.gathered():
            return losses, copy.deepcopy(model)
    torch.cuda.manual_seed(SEED)
    for index in range(4):
        optimizer.zero_grad()
        found = []
        for batch in batches(name, 0, index, accumulate):
            output = (case.loss or default_loss)(model, to_cuda(batch))
            loss = output[0] if isinstance(output, tuple) else output
            (loss / accumulate).backward()
            found.append(loss.detach())
        losses.append(torch.stack(found).mean().item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses, model


def check(name: str, mode: str, accumulate: int, clip: float | None) -> None:
    losses, model = train(name, None, accumulate, clip)
    found_losses, found = train(name, mode, accumulate, clip)
    assert found_losses == pytest.approx(losses, rel=1e-11)
    for (key, value), other in zip(found.named_parameters(), model.parameters(), strict=True):
        assert relative_error(value.detach(), other.detach()) < 1e-10, key
    for (key, buffer), other_buffer in zip(found.named_buffers(), model.named_buffers(), strict=True):
        assert relative_error(buffer, other_buffer[1]) < 1e-10, key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "lstm"])
def test_one_gpu_trains_as_eager_does(name: str, mode: str) -> None:
    check(name, mode, accumulate=1, clip=None)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, 0.05)])
@pytest.mark.parametrize("mode", MODES)
def test_ncclrank_trains_as_eager_does(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, mode: str, accumulate: int, clip: float | None
) -> None:
    monkeypatch.setattr(weft.api, "connect", lambda *_, **__: nccl)
    for name in ("tied_gpt", "checkpointed_gpt", "conv", "partly_used"):
        check(name, mode, accumulate, clip)


def test_a_checkpointed_recompute_draws_forwards_numbers() -> None:
    torch.manual_seed(0)
    model = TiedGPT(dropout=0.3, checkpointed=True, width=64).cuda()
    other = copy.deepcopy(model)
    ids = torch.randint(0, 61, (4, 12), device="cuda")
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=1.0, foreach=False), seed=SEED)
    step(ids)
    torch.cuda.manual_seed(SEED)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0, foreach=False)
    other(ids).backward()
    optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert relative_error(mine.detach(), theirs.detach()) < 1e-6, name


def test_bf16_compute_in_zero3_learns(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.api, "connect", lambda *_, **__: nccl)
    model = TiedGPT(dropout=0.0, width=128).cuda()
    precision = weft.Precision(compute=torch.bfloat16, reduce=torch.float32)
    step = weft.compile(model, torch.optim.AdamW(model.parameters(), lr=3e-3), mode="zero3", precision=precision)
    ids = torch.randint(0, 61, (8, 16), device="cuda")
    losses = [step(ids).item() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_steady_step_does_not_wait_for_the_gpu(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.api, "connect", lambda *_, **__: nccl)
    model = TiedGPT(dropout=0.1, width=128).cuda()
    step = weft.compile(model, torch.optim.AdamW(model.parameters()), mode="zero3", clip_norm=1.0)
    ids = torch.randint(0, 61, (8, 16), device="cuda")
    step(ids)
    step(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_links_the_load_and_the_next_tier_are_measured_on_a_gpu(nccl: Nccl) -> None:
    links = measure_links(nccl, device=CUDA, largest=4 << 20, seconds=1.0)
    assert links == Links.from_json(links.to_json())
    assert 0 < links.gather.alone(4 << 20) < 0.1
    assert links.cpu_seconds_per_byte == 0
    assert 0 < Load(CUDA).seconds < 1
    found = measure_tier(None, CUDA)
    assert found.write_bytes_per_second > 1e8
    assert found.read_bytes_per_second > 1e8
    assert 0 < found.latency < 0.1
    print(links, found)
