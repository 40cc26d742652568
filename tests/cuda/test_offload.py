"""Optimizer state of a GPU in pinned host memory: the same bits, in less memory, copied beside the step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.state.tiers import PinnedTier, aligned_block

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDTH, LAYERS = 2048, 12


def train(steps: int = 6, **offload: Any) -> tuple[list[float], dict[str, Any], int, weft.Step]:
    """Losses, the whole state, and the most memory that a later step took."""
    gc.collect()  # of steps before this one, which refer to themselves
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    passes = {"shard": {"bucket_bytes": 4 * WIDTH * WIDTH}, "offload": offload or True}
    step = weft.compile(model, optimizer, lambda m, x: m(x).square().mean(), clip_norm=1.0, passes=passes)
    losses = []
    for index in range(steps):
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(index)
        losses.append(step(torch.randn(64, WIDTH, generator=generator).cuda()))
    step.drain()
    peak = torch.cuda.max_memory_allocated() - before
    return [float(loss) for loss in losses], step.state_dict(), peak, step


@pytest.mark.parametrize("offload", [{"overlap": False}, {"window": 1}, {}, {"window": 50}])
def test_the_same_bits_in_less_memory(offload: dict[str, Any]) -> None:
    losses, state, peak, step = train()
    del step
    again, found, less, out = train(fragments="all", **offload)
    assert losses == again
    for name, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(value, found["optimizer"]["state"][name][key]), (name, key)
    for name, value in state["model"].items():
        assert torch.equal(value, found["model"][name]), name
    layer = 2 * 4 * WIDTH * WIDTH
    if offload.get("window", 2) <= 2:
        assert peak - less > (LAYERS - 3) * layer
    out.load_state_dict(state)
    assert torch.equal(
        out.state_dict()["optimizer"]["state"]["0.weight"]["exp_avg"],
        state["optimizer"]["state"]["0.weight"]["exp_avg"],
    )


def test_what_was_written_is_read() -> None:
    device = torch.device("cuda", 0)
    tier = PinnedTier(device)
    blocks = [aligned_block(nbytes, device) for nbytes in (4096, 12 << 20, 4096 * 5)]
    kept = [block.random_(0, 256).clone() for block in blocks]
    writes = [tier.write(key, block) for key, block in enumerate(blocks)]
    for key, block in enumerate(blocks):
        assert tier.read(key, block.zero_(), [writes[key]]).wait(60)
    assert all(torch.equal(one, other) for one, other in zip(blocks, kept, strict=True))
    longer = aligned_block(8192, device).fill_(7)
    assert tier.write(0, longer).finish(60)
    assert tier.read(0, longer.zero_()).wait(60)
    assert bool((longer == 7).all())
    tier.close()
