"""Ranks whose batches differ in shape, in what they reach, or in being numbers at all: the sequence holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.ranks import Ranks
from tests.reference import relative_error
from tests.test_shapes import causal, hugging_face

pytestmark = pytest.mark.distributed
Start = Callable[[int], Ranks]
MODES = ("replicate", "zero1", "zero2", "zero3")
SMALL_BUCKETS = {"shard": {"bucket_bytes": 4000}}


def lengths(rank: int, steps: int) -> list[int]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(16, 257, (steps,), generator=generator).tolist()


def without_dropout() -> nn.Module:
    model = hugging_face("gpt2").double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train_on_any_length(rank: int, steps: int, mode: str, accumulate: int = 1) -> tuple[int, list[float], Any]:
    model = without_dropout()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = weft.compile(model, optimizer, mode=mode, passes=SMALL_BUCKETS, timeout=60, accumulate=accumulate)
    traces = 0
    capture = step._capture

    def counting(*arguments: Any) -> Any:
        nonlocal traces
        traces += 1
        return capture(*arguments)

    step._capture = counting  # type: ignore[method-assign]
    losses = []
    wanted = iter(lengths(rank, steps * accumulate))
    for _ in range(steps):
        batches = [causal(2, next(wanted)) for _ in range(accumulate)]
        losses.append(float(step(batches if accumulate > 1 else batches[0])))
    return traces, losses, step.state_dict()["model"]


def train_plainly(world: int, steps: int, accumulate: int = 1) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model = without_dropout()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[list[float]] = [[] for _ in range(world)]
    wanted = [iter(lengths(rank, steps * accumulate)) for rank in range(world)]
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            total = 0.0
            for _ in range(accumulate):
                loss = model(**causal(2, next(wanted[rank]))).loss
                loss.backward()
                total += float(loss.detach())
            losses[rank].append(total / accumulate)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= world * accumulate
        optimizer.step()
    return losses, model.state_dict()


def check_lengths(found: list[Any], steps: int, accumulate: int = 1) -> None:
    losses, state = train_plainly(len(found), steps, accumulate)
    for rank, (traces, mine, parameters) in enumerate(found):
        assert traces <= 3
        assert relative_error(torch.tensor(mine), torch.tensor(losses[rank])) < 1e-12
        for key, value in state.items():
            assert relative_error(parameters[key], value) < 1e-12, key


def test_two_ranks_train_200_steps_on_lengths_of_their_own_with_three_traces(ranks: Start) -> None:
    check_lengths(ranks(2).run(train_on_any_length, 200, "zero1"), 200)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lengths_that_vary_keep_parity_in_every_mode(ranks: Start, mode: str, accumulate: int) -> None:
    check_lengths(ranks(2).run(train_on_any_length, 8, mode, accumulate), 8, accumulate)


# ---- a loss that is not a number ----


class Normed(nn.Module):
    """Dropout and batch norm: random and running state, besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def numbers(rank: int, index: int) -> torch.Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * index + rank))


def train_past_a_bad_batch(rank: int, mode: str, accumulate: int, clip: float | None, bad: bool) -> Any:
    model = Normed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = weft.compile(
        model, optimizer, mode=mode, passes={"shard": {"bucket_bytes": 200}}, accumulate=accumulate, clip_norm=clip,
        seed=1, timeout=60,
    )  # fmt: skip

    def batch(index: int) -> Any:
        return (
            [numbers(rank, index * accumulate + i) for i in range(accumulate)]
            if accumulate > 1
            else numbers(rank, index)
        )

    message = ""
    for index in range(6):
        if bad and index == 3:
            broken = batch(99)
            if rank == 1:
                (broken[-1] if accumulate > 1 else broken)[0, 0] = float("nan")
            try:
                step(broken)
            except weft.LossError as error:
                message = str(error)
        step(batch(index))
    state = step.state_dict()
    return message, state["model"], state["random"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 1.0)])
def test_a_nan_on_one_rank_is_an_error_on_all_and_changes_nothing(
    ranks: Start, mode: str, accumulate: int, clip: float | None
) -> None:
    found = ranks(2).run(train_past_a_bad_batch, mode, accumulate, clip, True)
    expected = ranks(2).run(train_past_a_bad_batch, mode, accumulate, clip, False)
    for (message, state, random), (_, other, other_random) in zip(found, expected, strict=True):
        assert "the loss of step 4 is not a number on rank 1" in message
        assert torch.equal(random, other_random)
        for key in state:
            assert torch.equal(state[key], other[key]), key


# ---- numbered collectives ----


def call_different_things(rank: int, debug: bool) -> str:
    model = hugging_face("gpt2").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = weft.compile(model, optimizer, mode="zero3", passes=SMALL_BUCKETS, timeout=5, debug=debug)
    step(causal(2, 16))
    try:
        step.evaluate(causal(2, 16)) if rank else step(causal(2, 16))
        step.drain()
        step.evaluate(causal(2, 16))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_collective_out_of_sequence_is_an_error_that_names_both_sides() -> None:
    pool = Ranks(2)  # of its own: its groups are broken afterwards
    try:
        found = pool.run(call_different_things, True)
    finally:
        pool.kill()
    assert any(message.startswith("SequenceError: gather ") for message in found)
    for message in found:
        assert "SequenceError" in message or "PeerError" in message
        if "SequenceError" in message:
            assert "on rank 0" in message
            assert "on rank 1" in message


def train_numbered(rank: int) -> None:
    for mode in MODES:
        outcome = []
        for debug in (False, True):
            model = Normed().double()
            optimizer = torch.optim.AdamW(model.parameters())
            step = weft.compile(model, optimizer, mode=mode, seed=1, timeout=60, debug=debug, clip_norm=1.0)
            for index in range(3):
                step(numbers(rank, index))
            step.evaluate(numbers(rank, 0))
            outcome.append(step.state_dict()["model"])
        assert all(torch.equal(outcome[0][key], outcome[1][key]) for key in outcome[0])


@pytest.mark.parametrize("world", [2, 3])
def test_numbering_collectives_changes_no_bit(ranks: Start, world: int) -> None:
    ranks(world).run(train_numbered)
