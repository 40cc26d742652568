"""Training with optimizer state in the next tier is the same training, in less memory."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.distributed.test_memory import reset_peak, status, warm_up
from tests.ranks import Ranks

MODES = ("replicate", "zero1", "zero3")
CLIP = 0.01
OFFLOAD: dict[str, Any] = {"fragments": "all"}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),  # it has state before the first step
}


def make_step(name: str, mode: str, accumulate: int, clip: float | None, **offload: Any) -> weft.Step:
    """Four layers in buckets of half a layer and less, in two groups."""
    torch.manual_seed(7)
    layers = [nn.Linear(18, 18) for _ in range(4)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh()))).double()
    groups = [
        {"params": [layer.weight for layer in layers], "weight_decay": 0.1},
        {"params": [layer.bias for layer in layers]},
    ]
    return weft.compile(
        model,
        OPTIMIZERS[name](groups),
        lambda model, x: model(x).square().mean(),
        mode=mode,
        accumulate=accumulate,
        clip_norm=clip,
        passes={"shard": {"bucket_bytes": 1500}, "offload": offload or True},
        timeout=60,
    )


def train(step: weft.Step, rank: int, indices: range, accumulate: int = 1) -> list[float]:
    losses = []
    for index in indices:
        generator = torch.Generator().manual_seed(100 * rank + index)
        data = [torch.randn(3, 18, generator=generator, dtype=torch.float64) for _ in range(accumulate)]
        losses.append(float(step(data if accumulate > 1 else data[0])))
    return losses


def assert_same(found: Any, expected: Any, where: str) -> None:
    """The same values to the last bit, all the way down."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert not found.is_meta, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}/{index}")
    else:
        assert found == expected, where


def everywhere(ranks: Callable[[int], Ranks], world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(0, *arguments)] if world == 1 else ranks(world).run(function, *arguments)


# ---- the same bits ----

RUNS: list[tuple[str, str, int, float | None, dict[str, Any]]] = [
    *(("adamw", mode, 1, None, OFFLOAD) for mode in MODES),
    *(("adamw", mode, 3, CLIP, {**OFFLOAD, "window": 1}) for mode in MODES),
    *(("momentum", mode, 1, CLIP, {**OFFLOAD, "overlap": False}) for mode in MODES),
    *(("momentum", mode, 3, None, {**OFFLOAD, "window": 50}) for mode in MODES),
    ("adamw", "zero1", 1, None, {"fragments": [1, 3]}),
    ("adagrad", "replicate", 1, None, OFFLOAD),
]


def compare_runs(rank: int) -> None:
    for name, mode, accumulate, clip, offload in RUNS:
        where = f"{name}, {mode}, accumulate {accumulate}, clip {clip}, {offload}"
        one, other = (make_step(name, mode, accumulate, clip, **given) for given in ({}, offload))
        losses = [train(step, rank, range(4), accumulate) for step in (one, other)]
        assert losses[0] == losses[1], where
        assert_same(other.state_dict(), one.state_dict(), where)
        assert one.grad_norm == other.grad_norm, where
        assert clip is None or (one.grad_norm or 0) > clip, "the clipping must matter"
        assert losses[0] != train(other, rank, range(4, 5), accumulate), "it goes on after a state_dict"
        assert_out(other, offload)


def assert_out(step: weft.Step, offload: dict[str, Any]) -> None:
    """Between steps no offloaded state is in memory, and exactly what was chosen is offloaded."""
    step.drain()
    assert step._executor is not None
    chosen = offload["fragments"]
    for held in step._executor.states:
        assert (held.fragment is not None) is (chosen == "all" or held.bucket.index in chosen)
        assert held.optimizer is not None
        for state in held.optimizer.twin.state.values():
            flats = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
            assert all(value.is_meta is (held.fragment is not None) for value in flats)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_offloading_changes_no_bit(ranks: Callable[[int], Ranks], world: int) -> None:
    everywhere(ranks, world, compare_runs)


class Heads(nn.Module):
    """Two heads; the first loss reaches both, later ones one of them: segments are split, and grow apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        features = torch.relu(self.body(x))
        return torch.stack([self.heads[int(one)](features).square().mean() for one in which]).sum()


def train_heads(rank: int, mode: str, path: str, **offload: Any) -> tuple[list[float], dict[str, Any]]:
    def compiled(**given: Any) -> weft.Step:
        torch.manual_seed(3)
        model = Heads().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        return weft.compile(model, optimizer, mode=mode, passes={"offload": given or True}, timeout=60)

    step, losses = compiled(**offload), []
    for index, which in enumerate(("012", "0", "12", "2", "012")):
        if index == 3:
            weft.save(step, path)
            step = compiled(**offload)
            weft.load(step, path)
        generator = torch.Generator().manual_seed(10 * index + rank)
        losses.append(float(step((torch.randn(4, 10, generator=generator, dtype=torch.float64), which))))
    return losses, step.state_dict()


def compare_heads(rank: int, path: str) -> None:
    for mode in MODES:
        expected = train_heads(rank, mode, f"{path}/in-{mode}")
        assert_same(train_heads(rank, mode, f"{path}/out-{mode}", **OFFLOAD), expected, mode)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_steps_that_reach_some_parameters_are_the_same(
    ranks: Callable[[int], Ranks], world: int, tmp_path: Path
) -> None:
    everywhere(ranks, world, compare_heads, str(tmp_path))


# ---- checkpoints ----


def go_to_and_fro(rank: int, path: str) -> None:
    """Save and load, and state dicts, from steps with state in memory to steps without and back, at every stage."""
    name, mode = "adamw", "zero1"
    through = make_step(name, mode, 1, None)
    train(through, rank, range(2))
    middle = through.state_dict()
    train(through, rank, range(2, 4))
    expected = through.state_dict()

    source = make_step(name, mode, 1, None, **OFFLOAD)
    train(source, rank, range(2))
    weft.save(source, f"{path}/out")
    assert_same(source.state_dict(), middle, "after a save")
    weft.save(source, f"{path}/background", background=True)
    train(source, rank, range(2, 4))
    assert_same(source.state_dict(), expected, "after a save in the background")

    targets: list[tuple[str, weft.Step]] = []
    for folder, offload in (("out", {}), ("background", {}), ("out", OFFLOAD)):
        target = make_step(name, mode, 1, None, **offload)
        weft.load(target, f"{path}/{folder}")
        targets.append((f"fresh, {folder}, {offload}", target))
    weft.save(targets[0][1], f"{path}/in")
    used = make_step(name, mode, 1, None, **OFFLOAD)
    train(used, rank, range(1))
    weft.load(used, f"{path}/in")
    targets.append(("used", used))
    again = make_step(name, mode, 1, None, **OFFLOAD)
    train(again, rank, range(3))
    again.load_state_dict(middle)
    targets.append(("state_dict", again))
    for what, target in targets:
        assert_same(target.state_dict(), middle, f"{what}, loaded")
        train(target, rank, range(2, 4))
        assert_same(target.state_dict(), expected, f"{what}, trained on")


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_go_to_and_fro(ranks: Callable[[int], Ranks], world: int, tmp_path: Path) -> None:
    everywhere(ranks, world, go_to_and_fro, str(tmp_path))


@pytest.mark.distributed
def test_the_optimizers_own_state_dict_has_what_is_out() -> None:
    one, other = (make_step("adamw", "replicate", 1, None, **given) for given in ({}, OFFLOAD))
    for step in (one, other):
        train(step, 0, range(2))
    saved = one.optimizer.state_dict()
    assert_same(other.optimizer.state_dict(), saved, "optimizer")
    train(other, 0, range(2, 3))
    other.optimizer.load_state_dict(saved)
    assert_same(other.optimizer.state_dict(), saved, "loaded")
    assert_out(other, OFFLOAD)
    with other.gathered() as model:
        assert not any(parameter.is_meta for parameter in model.parameters())


class Growing(torch.optim.Optimizer):
    """Keeps a sum in another dtype, from its fourth step on another one, and makes a tensor anew in every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, sum=torch.zeros_like(p, dtype=torch.float32))
                state["count"] += 1
                state["sum"] += p.grad.float()
                if state["count"] > 3:
                    state["late"] = state.get("late", torch.zeros_like(p)) + p.grad
                p.add_(state["sum"].to(p.dtype) + state.get("late", 0), alpha=-group["lr"])


@pytest.mark.distributed
def test_an_optimizer_may_keep_more_than_it_began_with(monkeypatch: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "growing", Growing)
    one, other = (make_step("growing", "zero1", 1, None, **given) for given in ({}, OFFLOAD))
    assert train(one, 0, range(6)) == train(other, 0, range(6))
    assert_same(other.state_dict(), one.state_dict(), "state")
    assert_out(other, OFFLOAD)


# ---- what goes wrong ----


@pytest.mark.distributed
def test_a_step_without_a_loss_changes_nothing() -> None:
    def compiled(**given: Any) -> weft.Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        return weft.compile(model, optimizer, lambda m, x: m(x).mean(), passes={"offload": given or True})

    expected, step = compiled(), compiled(**OFFLOAD)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(weft.LossError):
            step(x * float("nan"))
        expected(x)
        step(x)
    assert_same(step.state_dict(), expected.state_dict(), "state")


@pytest.mark.distributed
def test_a_full_disk_fails_the_step(monkeypatch: Any, tmp_path: Path) -> None:
    step = make_step("adamw", "zero1", 1, None, **OFFLOAD)
    train(step, 0, range(1))

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(weft.TierError, match=r"No space left on device.*offload="):
        train(step, 0, range(1, 3))
    with pytest.raises(RuntimeError, match="an earlier step failed half-way"):
        train(step, 0, range(3, 4))


@pytest.mark.distributed
def test_a_disk_that_does_not_answer_fails_the_step(monkeypatch: Any) -> None:
    step = make_step("adamw", "zero1", 1, None, **OFFLOAD)
    train(step, 0, range(1))
    assert step._executor is not None
    assert step._executor.fragments is not None
    step._executor.fragments.timeout = 0.2
    gate = threading.Event()
    monkeypatch.setattr(os, "preadv", lambda *arguments: gate.wait(60) and 0)
    with pytest.raises(weft.TierError, match=r"waited 0.2 s for the optimizer state of bucket .* to be read from"):
        train(step, 0, range(1, 2))
    gate.set()


# ---- memory ----

WIDTH, LAYERS = 1024, 16
LAYER = 4 * WIDTH * WIDTH
STATE = 2 * LAYER * LAYERS  # 128 MiB


def peaks(rank: int, passes: dict[str, Any]) -> dict[str, int]:
    """Bytes more than before the model was built, at the peak of the first step, of later ones, of a save, a load."""
    gc.collect()
    warm_up()
    before = status("VmRSS")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = weft.compile(model, optimizer, lambda m, x: m(x).square().mean(), passes=passes, timeout=60)
    x = torch.randn(2, WIDTH)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        actions: dict[str, Callable[[], Any]] = {
            "first": lambda: step(x),
            "later": lambda: [step(x) for _ in range(3)],
            "save": lambda: weft.save(step, folder),
            "load": lambda: weft.load(step, folder),
            "after": lambda: step(x),
        }
        for what, action in actions.items():
            gc.collect()
            reset_peak()
            action()
            step.drain()
            found[what] = status("VmHWM") - before
    return found


@pytest.mark.distributed
def test_offloaded_state_takes_no_memory() -> None:
    found = []
    for passes in ({}, {"offload": OFFLOAD}):
        pool = Ranks(1)
        try:
            found.append(pool.run(peaks, passes)[0])
        finally:
            pool.stop()
    blocks = 2 * 2 * LAYER
    for what in found[0]:
        spared = found[0][what] - found[1][what]
        # The first update makes its state outside the blocks, and is moved into them one fragment after the other.
        share = 0.6 if what == "first" else 0.8
        assert spared > share * (STATE - blocks), (what, [{k: v >> 20 for k, v in one.items()} for one in found])
