"""Stopping and going on: checkpoints across modes and worlds, bit-equal resumption, damage, full disks, export."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.models import CASES, batches, build
from tests.ranks import Ranks
from tests.reference import SEED, make_scheduler, relative_error
from weft.saving import storage
from weft.saving.storage import POINTER

pytestmark = pytest.mark.distributed
Start = Callable[[int], Ranks]
MODES = ("replicate", "zero1", "zero2", "zero3")
WORLDS = (1, 2, 3)


def compiled(name: str, mode: str, bucket_bytes: int = 2000, **options: Any) -> tuple[nn.Module, Any, weft.Step]:
    model = build(name)
    optimizer = CASES[name].optimizer(model)
    passes = {"shard": {"bucket_bytes": bucket_bytes}}
    options = {"seed": SEED, "timeout": 60, **options}
    return model, optimizer, weft.compile(model, optimizer, CASES[name].loss, mode=mode, passes=passes, **options)


def train(step: weft.Step, name: str, rank: int, steps: range) -> list[float]:
    losses = []
    for index in steps:
        output = step(batches(name, rank, index, 1)[0])
        losses.append((output[0] if isinstance(output, tuple) else output).item())
    return losses


def values(step: weft.Step) -> dict[str, torch.Tensor]:
    with step.gathered() as model:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except weft.CheckpointError as error:
        return str(error)
    return "no error"


# ---- any mode and world into any other ----


def eagerly(worlds: list[int]) -> dict[str, torch.Tensor]:
    """Plain PyTorch, with as many ranks in each step as are listed."""
    model = build("partly_used")
    optimizer = CASES["partly_used"].optimizer(model)
    for index, world in enumerate(worlds):
        optimizer.zero_grad()
        for rank in range(world):
            (model(*batches("partly_used", rank, index, 1)[0]) / world).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_in_all_modes(rank: int, folder: Path, world: int) -> None:
    for mode in MODES:
        _, _, step = compiled("partly_used", mode, bucket_bytes=300)
        train(step, "partly_used", rank, range(3))
        weft.save(step, folder / f"{mode}-{world}")


def load_in_all_modes(rank: int, folder: Path) -> dict[tuple[str, int, str], tuple[float, int]]:
    errors = {}
    for mode in MODES:
        _, _, step = compiled("partly_used", mode, bucket_bytes=700)
        if mode in ("replicate", "zero2"):  # a state that must be overwritten entirely; the others load before a step
            train(step, "partly_used", rank, range(20, 21))
        for saved_mode in MODES:
            for world in WORLDS:
                weft.load(step, folder / f"{saved_mode}-{world}")
                train(step, "partly_used", rank, range(3, 5))
                expected = torch.load(folder / f"expected-{world}-{step._collectives.world}")
                found = values(step)
                worst = max(relative_error(found[name], expected[name]) for name in expected)
                errors[saved_mode, world, mode] = (worst, step.steps)
    return errors


def draws_in_another_world(rank: int, folder: Path, save: bool) -> torch.Tensor:
    _, _, step = compiled("tied_gpt", "zero1")
    if save:
        train(step, "tied_gpt", rank, range(1))
        weft.save(step, folder)
    else:
        weft.load(step, folder)
    return step._random_state if step._executor is None else step._executor.random_state


@dataclass
class AcrossWorlds:
    """What was found by going through all worlds once: starting processes takes longer than what they do."""

    errors: list[dict[tuple[str, int, str], tuple[float, int]]]
    saved_draws: list[torch.Tensor]
    loaded_draws: list[list[torch.Tensor]]


@pytest.fixture(scope="module")
def across_worlds(ranks: Start, tmp_path_factory: pytest.TempPathFactory) -> AcrossWorlds:
    folder = tmp_path_factory.mktemp("across")
    for before in WORLDS:
        for after in WORLDS:
            torch.save(eagerly([before] * 3 + [after] * 2), folder / f"expected-{before}-{after}")
    save_in_all_modes(0, folder, 1)
    ranks(2).run(save_in_all_modes, folder, 2)
    saved_draws = ranks(2).run(draws_in_another_world, folder / "draws", True)
    ranks(3).run(save_in_all_modes, folder, 3)
    loaded_draws = [ranks(3).run(draws_in_another_world, folder / "draws", False) for _ in range(2)]
    errors = [load_in_all_modes(0, folder)]
    for world in (3, 2):
        errors += ranks(world).run(load_in_all_modes, folder)
    return AcrossWorlds(errors, saved_draws, loaded_draws)


def test_a_checkpoint_of_any_mode_and_world_goes_on_in_any_other(across_worlds: AcrossWorlds) -> None:
    assert len(across_worlds.errors) == sum(WORLDS)
    for errors in across_worlds.errors:
        assert len(errors) == len(MODES) * len(MODES) * len(WORLDS)
        for case, (worst, steps) in errors.items():
            assert worst < 1e-12, case
            assert steps == 5, case


def test_a_rank_without_a_saved_random_state_derives_one_of_its_own(across_worlds: AcrossWorlds) -> None:
    saved, (once, again) = across_worlds.saved_draws, across_worlds.loaded_draws
    for rank in range(3):
        assert torch.equal(once[rank], again[rank])
    assert torch.equal(saved[0], once[0])
    assert torch.equal(saved[1], once[1])
    assert not torch.equal(once[2], once[0])
    assert not torch.equal(once[2], once[1])


def stop_and_go_on(rank: int, folder: Path, mode: str) -> dict[str, Any]:
    """Dropout, a scheduler and clipping: once straight, once from a checkpoint loaded before the first step."""

    def start() -> tuple[weft.Step, Any]:
        _, optimizer, step = compiled("tied_gpt", mode, clip_norm=0.5)
        return step, make_scheduler(optimizer)

    def go(step: weft.Step, scheduler: Any, steps: range) -> list[float]:
        losses = []
        for index in steps:
            losses += train(step, "tied_gpt", rank, range(index, index + 1))
            scheduler.step()
        return losses

    step, scheduler = start()
    go(step, scheduler, range(3))
    handle = weft.save(step, folder, extra={"schedule": scheduler.state_dict()}, background=mode == "zero1")
    straight = go(step, scheduler, range(3, 6))
    handle.wait()
    step_again, scheduler_again = start()
    extra = weft.load(step_again, folder)
    scheduler_again.load_state_dict(extra["schedule"])
    resumed = go(step_again, scheduler_again, range(3, 6))
    return {
        "losses": (straight, resumed),
        "values": same(values(step), values(step_again)),
        "draws": torch.equal(step._executor.random_state, step_again._executor.random_state),  # type: ignore[union-attr]
        "lr": (scheduler.get_last_lr(), scheduler_again.get_last_lr()),
    }


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero3"])
def test_training_goes_on_bit_for_bit_as_if_it_had_not_stopped(ranks: Start, tmp_path: Path, mode: str) -> None:
    for answer in ranks(2).run(stop_and_go_on, tmp_path / "checkpoint", mode):
        assert answer["losses"][0] == answer["losses"][1]
        assert answer["values"]
        assert answer["draws"]
        assert answer["lr"][0] == answer["lr"][1]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir() if path.name.endswith(".new")] == []


def test_masters_of_a_wider_dtype_keep_every_bit(tmp_path: Path) -> None:
    model, _, step = compiled("tied_gpt", "replicate")
    train(step, "tied_gpt", 0, range(2))
    weft.save(step, tmp_path)
    train(step, "tied_gpt", 0, range(2, 4))
    narrow = build("tied_gpt", torch.float32)
    double = weft.Precision(compute=torch.float64, reduce=torch.float64, master=torch.float64)
    other = weft.compile(narrow, CASES["tied_gpt"].optimizer(narrow), mode="zero3", precision=double, seed=SEED)
    weft.load(other, tmp_path)
    train(other, "tied_gpt", 0, range(2, 4))
    expected, found = dict(model.named_parameters()), values(other)
    assert max(relative_error(found[name], expected[name].detach()) for name in expected) < 1e-12
    # And into a narrower one: cast, state and all.
    plain = build("tied_gpt", torch.float32)
    third = weft.compile(plain, CASES["tied_gpt"].optimizer(plain), seed=SEED)
    weft.load(third, tmp_path)
    for index in range(2, 4):
        third(batches("tied_gpt", 0, index, 1)[0])
    assert max(relative_error(p.detach(), expected[n].detach()) for n, p in plain.named_parameters()) < 1e-3
    state = third.state_dict()["optimizer"]["state"]["norm.weight"]
    assert state["exp_avg"].dtype is torch.float32
    assert state["step"].item() == 4


def pass_on_without_training(rank: int, folder: Path) -> list[bool]:
    """Loaded, and saved again before any step; then loaded into a step that runs."""
    _, _, first = compiled("tied_gpt", "zero2")
    train(first, "tied_gpt", rank, range(2))
    weft.save(first, folder / "one", extra=1)
    _, _, between = compiled("tied_gpt", "zero3")
    weft.load(between, folder / "one")
    weft.save(between, folder / "two", extra=2)
    weft.save(between, folder / "one", extra=3)  # over the files from which it was loaded
    _, _, last = compiled("tied_gpt", "zero2")
    weft.load(last, folder / "two")
    for step in (first, between, last):
        train(step, "tied_gpt", rank, range(2, 4))
    return [same(values(first), values(last)), same(values(first), values(between))]


def test_a_checkpoint_may_be_passed_on_before_the_first_step(ranks: Start, tmp_path: Path) -> None:
    assert ranks(2).run(pass_on_without_training, tmp_path) == [[True, True]] * 2


def test_state_dict_after_load_and_before_the_first_step_has_the_loaded_state(tmp_path: Path) -> None:
    _, _, step = compiled("tied_gpt", "replicate")
    train(step, "tied_gpt", 0, range(2))
    weft.save(step, tmp_path)
    _, optimizer, other = compiled("tied_gpt", "replicate")
    weft.load(other, tmp_path)
    expected, found = step.state_dict(), other.state_dict()
    for name, state in expected["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], found["optimizer"]["state"][name]["exp_avg"])
    assert len(optimizer.state_dict()["state"]) == len(list(other.model.parameters()))
    assert train(step, "tied_gpt", 0, range(2, 4)) == train(other, "tied_gpt", 0, range(2, 4))
    assert same(values(step), values(other))


class Averaging(torch.optim.SGD):
    """An optimizer that is not elementwise and keeps odd things in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                history = state.setdefault("history", [])
                history.append((len(history), parameter.grad.norm()))
                state["mean"] = parameter.grad.mean(0, keepdim=True)
                parameter.sub_(group["lr"] * (parameter.grad + state["mean"]) / history[0][1])


def whole_optimizers(rank: int, folder: Path) -> list[bool]:
    answers = []
    for make in (lambda m: Averaging(m.parameters(), lr=0.1), lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)):
        steps = []
        for _ in range(2):
            model = build("quantised")
            steps.append(weft.compile(model, make(model), seed=SEED, timeout=60))
        train(steps[0], "quantised", rank, range(2))
        weft.save(steps[0], folder)
        weft.load(steps[1], folder)
        losses = [train(step, "quantised", rank, range(2, 4)) for step in steps]
        answers.append(losses[0] == losses[1] and same(values(steps[0]), values(steps[1])))
    return answers


def test_whole_tensor_optimizers_go_on_with_all_of_their_state(ranks: Start, tmp_path: Path) -> None:
    assert ranks(2).run(whole_optimizers, tmp_path) == [[True, True]] * 2


def frozen_and_buffers(rank: int, folder: Path) -> list[Any]:
    answers = []
    for name, mode, other in (("lora", "zero3", "zero1"), ("conv", "zero2", "replicate"), ("lstm", "zero3", "zero2")):
        _, _, step = compiled(name, mode)
        train(step, name, rank, range(3))
        weft.save(step, folder)
        _, _, resumed = compiled(name, other)
        weft.load(resumed, folder)
        buffers = {key: value.clone() for key, value in resumed.model.named_buffers()}
        losses = train(step, name, rank, range(3, 5)), train(resumed, name, rank, range(3, 5))
        one, two = values(step), values(resumed)
        worst = max(relative_error(two[key], one[key]) for key in one)
        answers.append((buffers, worst, losses))
    return answers


def test_frozen_parameters_buffers_and_channels_last_weights_are_kept(ranks: Start, tmp_path: Path) -> None:
    one, two = ranks(2).run(frozen_and_buffers, tmp_path)
    for mine, other in zip(one, two, strict=True):
        assert same(mine[0], other[0]), "rank 0's buffers on every rank"
        for _, worst, (straight, resumed) in (mine, other):
            assert worst < 1e-12
            assert straight == pytest.approx(resumed, rel=1e-12)
    assert one[1][0]["calls"].item() == 3


# ---- extra, the background ----


def test_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    _, optimizer, step = compiled("tied_gpt", "replicate")
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
    generator = torch.Generator().manual_seed(3)
    extra = {
        "schedule": schedule.state_dict(),
        "generator": generator.get_state(),
        "position": (1, [2.5, None, True], float("inf")),
        4: {"lr": torch.tensor(0.1), "$odd": "text"},
    }
    weft.save(step, tmp_path, extra=extra)
    found = weft.load(step, tmp_path)
    assert torch.equal(found.pop("generator"), extra.pop("generator"))  # type: ignore[arg-type]
    assert found == extra
    assert type(found["schedule"]["milestones"]) is type(schedule.milestones)


def save_what_cannot_be_kept(rank: int, folder: Path) -> str:
    _, _, step = compiled("tied_gpt", "zero1")
    return error_of(lambda: weft.save(step, folder / "new", extra={"model": object() if rank == 1 else None}))


def test_an_extra_that_cannot_be_kept_is_refused_before_anything_is_written(ranks: Start, tmp_path: Path) -> None:
    for message in ranks(2).run(save_what_cannot_be_kept, tmp_path):
        assert "rank 1: extra/model is a object" in message
    assert list(tmp_path.iterdir()) == []


def background(rank: int, folder: Path) -> dict[str, Any]:
    _, _, step = compiled("tied_gpt", "zero2")
    train(step, "tied_gpt", rank, range(2))
    at_call = values(step)
    handle = weft.save(step, folder, extra="first", background=True)
    train(step, "tied_gpt", rank, range(2, 8))  # while it is written
    handle.wait()
    done = handle.done()
    _, _, other = compiled("tied_gpt", "zero3")
    extra = weft.load(other, folder)
    train(other, "tied_gpt", rank, range(2, 8))
    one, two = values(step), values(other)
    weft.load(other, folder)
    return {"extra": extra, "at_call": same(at_call, values(other)), "after": same(one, two), "done": done}


def test_a_background_save_holds_the_values_of_the_call(ranks: Start, tmp_path: Path) -> None:
    for answer in ranks(2).run(background, tmp_path):
        assert answer == {"extra": "first", "at_call": True, "after": True, "done": True}


EXIT = """
import sys, torch, weft
model = torch.nn.Linear(700, 700)
step = weft.compile(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean())
step(torch.ones(2, 700))
weft.save(step, sys.argv[1], extra="saved", background=True)
"""


def test_the_end_of_the_interpreter_waits_for_a_background_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], check=True, timeout=120)
    assert json.loads((tmp_path / POINTER).read_text())["extra"] == "saved"
    assert len(list(tmp_path.iterdir())) == 2


def test_hyperparameters_are_kept_tensors_among_them(tmp_path: Path) -> None:
    def start(lr: float) -> tuple[torch.optim.Optimizer, weft.Step]:
        model = build("tied_gpt")
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(lr), betas=(0.8, 0.9), capturable=False)
        return optimizer, weft.compile(model, optimizer, seed=SEED)

    optimizer, step = start(0.25)
    optimizer.param_groups[0] |= {"odd": [None, True, float("inf")]}
    weft.save(step, tmp_path)
    other_optimizer, other = start(0.5)
    own = other_optimizer.param_groups[0]["lr"]
    other_optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    weft.load(other, tmp_path)
    assert own is other_optimizer.param_groups[0]["lr"]
    assert own.item() == 0.25
    assert other_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert other_optimizer.param_groups[0]["odd"] == [None, True, float("inf")]


# ---- what goes wrong ----


def test_another_order_of_elements_is_refused_with_the_names(tmp_path: Path) -> None:
    _, _, step = compiled("conv", "replicate")
    weft.save(step, tmp_path)
    model = build("conv").to(memory_format=torch.contiguous_format)
    other = weft.compile(model, CASES["conv"].optimizer(model), CASES["conv"].loss)
    message = error_of(lambda: weft.load(other, tmp_path))
    assert "elements lie in another order" in message
    assert "conv2.weight" in message


def break_and_load(rank: int, folder: Path) -> dict[str, tuple[str, bool]]:
    """Every kind of damage: the message, and whether the step is as it was and trains on."""
    _, _, step = compiled("tied_gpt", "zero2")
    train(step, "tied_gpt", rank, range(1))
    weft.save(step, folder / "good")
    barrier = step._collectives.gather_objects

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        one, *others = model.parameters()
        return torch.optim.AdamW([{"params": [one]}, {"params": others}])

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-8])

    def edit(path: Path) -> None:
        path.write_text(path.read_text().replace('"steps": 1', '"steps": 7'))

    def the_file(copied: Path, name: str) -> Path:
        return next(copied.glob(f"data-*/{name}"))

    damages: dict[str, Callable[[Path], Any]] = {
        "no folder": shutil.rmtree,
        "no pointer": lambda path: (path / POINTER).unlink(),
        "json cut": lambda path: cut(path / POINTER),
        "json edited": lambda path: edit(path / POINTER),
        "data cut": lambda path: cut(the_file(path, "rank-00001.safetensors")),
        "data changed": lambda path: flip(the_file(path, "rank-00000.safetensors")),
        "file missing": lambda path: the_file(path, "rank-00001.safetensors").unlink(),
    }
    other = copy.deepcopy(build("tied_gpt"))
    other.extra = nn.Parameter(torch.ones(2))  # type: ignore[assignment]
    other.norm = nn.LayerNorm(20, bias=False)  # type: ignore[assignment]
    other.position = nn.Embedding(7, 20)  # type: ignore[assignment]
    steps = {
        "other model": weft.compile(other, torch.optim.AdamW(other.parameters()), mode="zero1", timeout=60),
        "other optimizer": weft.compile(m := build("tied_gpt"), adam(m), timeout=60),
        "other groups": weft.compile(m := build("tied_gpt"), two_groups(m), timeout=60),
    }
    found = {}
    for what in [*damages, *steps]:
        copied = folder / what
        if rank == 0:
            shutil.copytree(folder / "good", copied)
            damages.get(what, lambda _: None)(copied)
        barrier(None)
        tried = steps.get(what, step)
        before = values(tried)
        message = error_of(lambda tried=tried, copied=copied: weft.load(tried, copied))  # type: ignore[misc]
        found[what] = message, same(before, values(tried)) and tried.steps == (1 if tried is step else 0)
    weft.load(step, folder / "good")
    train(step, "tied_gpt", rank, range(1, 2))
    return found


def test_what_cannot_be_loaded_is_an_error_on_every_rank_and_changes_nothing(ranks: Start, tmp_path: Path) -> None:
    words = {
        "no folder": "there is no such folder",
        "no pointer": "the folder has no checkpoint.json",
        "json cut": "checkpoint.json is damaged",
        "json edited": "checkpoint.json was changed since it was written",
        "data cut": "were written",
        "data changed": "CRC-32",
        "file missing": "rank-00001.safetensors, a file of this checkpoint: No such file",
        "other model": "the model lacks these parameters of the checkpoint: norm.bias",
        "other optimizer": "the checkpoint is of AdamW, and the step's optimizer is Adam",
        "other groups": "the checkpoint has 1 parameter groups, and the optimizer 2",
    }
    for answer in ranks(2).run(break_and_load, tmp_path):
        for what, (message, untouched) in answer.items():
            assert words[what] in message, what
            assert untouched, what
        assert "the checkpoint lacks these parameters of the model: extra" in answer["other model"][0]
        assert "position.weight [16, 20] in the checkpoint and [7, 20] in the model" in answer["other model"][0]


def fill_the_disk(rank: int, folder: Path, in_background: bool) -> dict[str, Any]:
    _, _, step = compiled("tied_gpt", "zero2")
    train(step, "tied_gpt", rank, range(2))
    weft.save(step, folder, extra="good")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        handle = None
        message = error_of(lambda: weft.save(step, folder, extra="bad", background=in_background).wait())
        del handle
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in folder.iterdir())
    step._collectives.gather_objects(None)
    straight = train(step, "tied_gpt", rank, range(2, 4))
    _, _, other = compiled("tied_gpt", "zero2")
    extra = weft.load(other, folder)
    resumed = train(other, "tied_gpt", rank, range(2, 4))
    weft.save(step, folder, extra="again")
    return {"message": message, "left": left, "extra": extra, "same": straight == resumed}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_on_one_rank_leaves_the_last_good_one(ranks: Start, tmp_path: Path, in_background: bool) -> None:
    for answer in ranks(2).run(fill_the_disk, tmp_path / "checkpoint", in_background):
        assert "rank 1: cannot write" in answer["message"]
        assert "rank-00001.safetensors: File too large" in answer["message"]
        assert "the checkpoint before it is untouched" in answer["message"]
        assert len(answer["left"]) == 2
        assert answer["extra"] == "good"
        assert answer["same"]
    assert json.loads((tmp_path / "checkpoint" / POINTER).read_text())["extra"] == "again"


def die_at(moment: int) -> None:
    """SIGKILL this process before or after one of the things that a save does to the disk, in turn."""
    count = iter(range(10_000))

    def watched(action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            result = action(*args, **kwargs)
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for owner, names in (
        (os, ("fsync", "replace", "mkdir", "rmdir", "unlink")),
        (storage._Checksummed, ("write",)),
        (json, ("dump",)),
    ):
        for name in names:
            setattr(owner, name, watched(getattr(owner, name)))


def test_a_save_killed_at_any_of_its_own_moments_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    _, _, step = compiled("quantised", "replicate")
    _, _, reader = compiled("quantised", "replicate")
    train(reader, "quantised", 0, range(1))
    train(step, "quantised", 0, range(2))
    weft.save(step, tmp_path / "good", extra="old")
    states = {"old": values(step)}
    train(step, "quantised", 0, range(2, 3))
    states["new"] = values(step)
    seen = []
    for moment in range(10_000):
        shutil.copytree(tmp_path / "good", tmp_path / "tried", dirs_exist_ok=True)
        child = os.fork()
        if child == 0:
            die_at(moment)
            weft.save(step, tmp_path / "tried", extra="new")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        extra = weft.load(reader, tmp_path / "tried")
        assert same(values(reader), states[extra]), moment
        seen.append(extra)
        if status == 0:
            break
        weft.save(step, tmp_path / "tried")
        assert len(list((tmp_path / "tried").iterdir())) == 2, moment
        shutil.rmtree(tmp_path / "tried")
    assert len(seen) > 50, "there are that many moments"
    assert seen == sorted(seen, reverse=True), "old until one moment, new from then on"


def test_what_interrupted_saves_left_is_removed_by_the_next(tmp_path: Path) -> None:
    _, _, step = compiled("tied_gpt", "replicate")
    (tmp_path / "data-00000001-aaaaaaaa").mkdir()
    (tmp_path / "data-00000001-aaaaaaaa" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / f"{POINTER}.new").write_text("{")
    (tmp_path / "mine.txt").write_text("the user's own")
    weft.save(step, tmp_path)
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["check", "data-", "mine."]
    weft.load(step, tmp_path)


def test_no_pickle_is_read_or_written(tmp_path: Path) -> None:
    _, _, step = compiled("tied_gpt", "replicate")
    weft.save(step, tmp_path, extra={"values": torch.arange(3)})
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".safetensors")
    from safetensors import safe_open  # the format's own reader takes the files

    with safe_open(next(tmp_path.glob("data-*/*.safetensors")), "pt") as file:
        assert torch.equal(file.get_tensor("extra/values:0"), torch.arange(3))


# ---- export ----


def export_and_load(rank: int, folder: Path, mode: str, largest_file: int) -> bool:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    step = weft.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), mode=mode, timeout=60)
    batch = {"input_ids": torch.arange(12).view(2, 6) + rank}
    batch["labels"] = batch["input_ids"]
    for _ in range(2):
        step(batch)
    weft.export(step, folder, largest_file)
    found = AutoModelForCausalLM.from_pretrained(folder)
    expected = values(step)
    tied = found.lm_head.weight is found.transformer.wte.weight
    return tied and same(expected, {name: value.detach() for name, value in found.named_parameters()})


@pytest.mark.parametrize(("mode", "largest_file", "files"), [("zero3", 5 * 10**9, 1), ("zero1", 8000, 4)])
def test_transformers_loads_what_export_wrote(
    ranks: Start, tmp_path: Path, mode: str, largest_file: int, files: int
) -> None:
    assert all(ranks(2).run(export_and_load, tmp_path, mode, largest_file))
    assert len(list(tmp_path.glob("*.safetensors"))) >= files
    assert (tmp_path / "model.safetensors.index.json").exists() == (files > 1)


class HalfFrozen(nn.Module):
    """Trained and frozen parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def load_into_a_model_on_meta(rank: int, folder: Path) -> None:
    def start(device: str) -> weft.Step:
        with torch.device(device):
            model = HalfFrozen()
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        return weft.compile(model, optimizer, mode=mode, seed=SEED, timeout=60)

    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))  # one for all: buffers are rank 0's on a load
    for mode in MODES:
        step = start("cpu")
        step(batch)
        weft.save(step, folder / mode)
        expected = [step(batch).item(), step.evaluate(batch).item()]
        loaded = start("meta")
        weft.load(loaded, folder / mode)
        assert [loaded(batch).item(), loaded.evaluate(batch).item()] == expected, mode


def test_a_load_before_the_first_step_fills_a_model_on_meta(ranks: Start, tmp_path: Path) -> None:
    ranks(2).run(load_into_a_model_on_meta, tmp_path)


# ---- killed at any moment ----


def test_a_training_killed_at_random_moments_ends_as_if_it_had_not_been() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_points", "--count", "3", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3" in done.stdout
