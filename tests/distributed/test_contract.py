"""What holds between ranks besides parity: reads while gathers are in flight, ranks that differ, bits, checkpoints."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.models import CASES, PartlyUsed, TiedGPT, batches, build, ids
from tests.ranks import Ranks
from tests.reference import SEED, relative_error, train_compiled, train_eagerly
from weft.trace.capture import default_loss

pytestmark = pytest.mark.distributed
Start = Callable[[int], Ranks]


def compiled(name: str, mode: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, weft.Step]:
    model = build(name)
    optimizer = CASES[name].optimizer(model)
    passes = {"shard": {"bucket_bytes": 2000}}
    step = weft.compile(model, optimizer, CASES[name].loss, mode=mode, seed=SEED, passes=passes, timeout=60, **options)
    return model, optimizer, step


# ---- what is true when step returns ----


def read_at_once(rank: int, mode: str) -> dict[str, list[torch.Tensor]]:
    """Reads of the model right after a step, each in another way, while its gathers are in flight."""
    reads = {}
    for how in ("state_dict", "attribute", "forward", "deepcopy", "data"):
        model, _, step = compiled("tied_gpt", mode)
        step(batches("tied_gpt", rank, 0, 1)[0])
        assert step._executor is not None
        assert step._executor.gathers, "nothing is in flight, so the test tests nothing"
        if how == "state_dict":
            reads[how] = list(model.state_dict().values())
        elif how == "attribute":
            reads[how] = [parameter.detach().clone() for parameter in model.parameters()]
        elif how == "data":
            reads[how] = [parameter.data.clone() for parameter in model.parameters()]
        elif how == "deepcopy":
            reads[how] = [parameter.detach() for parameter in copy.deepcopy(model).parameters()]
        else:
            with torch.no_grad():
                reads[how] = [model.eval()(ids(torch.Generator().manual_seed(0)))]
    return reads


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_the_model_may_be_read_while_gathers_are_in_flight(ranks: Start, mode: str) -> None:
    expected = train_eagerly("tied_gpt", world=2, steps=1)
    for reads in ranks(2).run(read_at_once, mode):
        for how in ("attribute", "deepcopy", "data"):
            for found, name in zip(reads[how], expected.parameters, strict=True):
                assert relative_error(found, expected.parameters[name]) < 1e-12, (how, name)
        assert relative_error(reads["state_dict"][0], expected.parameters["embedding.weight"]) < 1e-12
        model = build("tied_gpt").eval()
        model.load_state_dict(expected.parameters, strict=False)
        with torch.no_grad():
            assert relative_error(reads["forward"][0], model(ids(torch.Generator().manual_seed(0)))) < 1e-12


def use_outside_gathered(rank: int) -> dict[str, str]:
    model, _, step = compiled("tied_gpt", "zero3")
    batch = batches("tied_gpt", rank, 0, 1)[0]
    step(batch)
    parameter = model.embedding.weight
    assert tuple(parameter.shape) == (61, 20)  # type: ignore[union-attr]
    assert parameter.device.type == "cpu"  # type: ignore[union-attr]
    uses = {
        "forward": lambda: model(batch),
        "read": lambda: parameter.sum(),  # type: ignore[union-attr,operator]
        "state_dict": model.state_dict,
        "write": lambda: parameter.data.zero_(),  # type: ignore[union-attr,operator]
        "deepcopy": lambda: copy.deepcopy(model),
    }
    errors = {}
    for name, use in uses.items():
        try:
            use()
            errors[name] = "no error"
        except weft.ShardedError as error:
            errors[name] = str(error)
    assert "managed by weft" in repr(parameter)
    with step.gathered() as whole:
        whole(batch)
    return errors


def test_a_sharded_model_outside_gathered_is_an_error_that_says_so(ranks: Start) -> None:
    for errors in ranks(2).run(use_outside_gathered):
        for use, message in errors.items():
            assert "step.gathered()" in message, use


def write_between_steps(rank: int, mode: str) -> list[torch.Tensor]:
    model, _, step = compiled("tied_gpt", mode)
    step(batches("tied_gpt", rank, 0, 1)[0])
    with step.gathered() as whole, torch.no_grad():
        whole.norm.weight.fill_(0.5)  # type: ignore[union-attr,operator]
        whole.embedding.weight[3:7] = 0.0  # type: ignore[union-attr,index]
    step(batches("tied_gpt", rank, 1, 1)[0])
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero3"])
def test_what_is_written_inside_gathered_is_what_training_goes_on_from(ranks: Start, mode: str) -> None:
    one, other = ranks(2).run(write_between_steps, mode)
    unwritten = train_eagerly("tied_gpt", world=2, steps=2).parameters
    names = list(unwritten)
    for name, mine, theirs in zip(names, one, other, strict=True):
        assert torch.equal(mine, theirs), name
    assert (one[names.index("norm.weight")] - 0.5).abs().max() < 0.02, "one step away from what was written"
    assert (unwritten["norm.weight"] - 0.5).abs().min() > 0.4
    assert one[names.index("embedding.weight")][3:7].abs().max() < 0.02


def evaluate_in_between(rank: int, mode: str) -> tuple[float, list[torch.Tensor]]:
    model, _, step = compiled("checkpointed_gpt", mode)
    for index in range(3):
        step(batches("checkpointed_gpt", rank, index, 1)[0])
        value = step.evaluate(batches("checkpointed_gpt", rank, 50, 1)[0])
        assert model.training
    with step.gathered():
        return value.item(), [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["replicate", "zero2", "zero3"])
def test_evaluate_gives_eval_modes_loss_and_leaves_training_as_it_was(ranks: Start, mode: str) -> None:
    answers = ranks(2).run(evaluate_in_between, mode)
    expected = train_eagerly("checkpointed_gpt", world=2, steps=3)
    model = build("checkpointed_gpt").eval()
    model.load_state_dict(expected.parameters, strict=False)
    for rank, (value, parameters) in enumerate(answers):
        with torch.no_grad():
            assert value == pytest.approx(model(batches("checkpointed_gpt", rank, 50, 1)[0]).item(), rel=1e-12)
        for found, name in zip(parameters, expected.parameters, strict=True):
            assert relative_error(found, expected.parameters[name]) < 1e-12, name


# ---- ranks that differ ----


def different_heads(rank: int, mode: str, accumulate: int) -> list[torch.Tensor]:
    """Rank 0 trains head a, rank 1 head b; later both train b, and a must stand still."""
    torch.manual_seed(0)
    model = PartlyUsed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step = weft.compile(
        model,
        optimizer,
        mode=mode,
        accumulate=accumulate,
        clip_norm=0.5,
        timeout=60,
        passes={"shard": {"bucket_bytes": 300}},
    )
    for index in range(4):
        micro = [(x, "a" if rank == 0 and index < 2 else "b") for x in different_batches(rank, index, accumulate)]
        step(micro if accumulate > 1 else micro[0])
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def different_batches(rank: int, step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    # Shapes differ from rank to rank too.
    return [torch.randn(3 + rank, 10, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "zero3"])
def test_ranks_may_see_other_shapes_and_reach_other_parameters(ranks: Start, mode: str, accumulate: int) -> None:
    answers = ranks(2).run(different_heads, mode, accumulate)
    torch.manual_seed(0)
    model = PartlyUsed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            for x in different_batches(rank, index, accumulate):
                (model(x, "a" if rank == 0 and index < 2 else "b") / (2 * accumulate)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for answer in answers:
        for found, (name, expected) in zip(answer, model.named_parameters(), strict=True):
            assert relative_error(found, expected.detach()) < 1e-12, name


def start_differently(rank: int, mode: str) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = TiedGPT().double()
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), mode=mode, timeout=60)
    step(ids(torch.Generator().manual_seed(rank)))
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_training_starts_from_rank_0s_values(ranks: Start, mode: str) -> None:
    torch.manual_seed(0)
    expected = [parameter.detach() for parameter in TiedGPT().double().parameters()]
    for answer in ranks(2).run(start_differently, mode):
        assert all(torch.equal(found, value) for found, value in zip(answer, expected, strict=True))


def compile_different_models(rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4 + rank), nn.Flatten(0))
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum(), timeout=60)
    try:
        step(torch.ones(2, 4))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_models_are_told_the_first_difference(ranks: Start) -> None:
    for message in ranks(2).run(compile_different_models):
        assert "0.weight [4, 4]" in message
        assert "0.weight [5, 4]" in message


def train_on_a_mesh(rank: int) -> list[torch.Tensor] | None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 2])
    if rank == 1:
        return None
    model, _, step = compiled("tied_gpt", "zero2", mesh=mesh)
    step(batches("tied_gpt", rank // 2, 0, 1)[0])
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_mesh_of_some_ranks_trains_on_those_alone(ranks: Start) -> None:
    answers = ranks(3).run(train_on_a_mesh)
    expected = train_eagerly("tied_gpt", world=2, steps=1).parameters
    for answer in (answers[0], answers[2]):
        for found, name in zip(answer, expected, strict=True):
            assert relative_error(found, expected[name]) < 1e-12, name


# ---- bits ----


def train_in_variants(rank: int, variants: list[tuple[str, dict[str, Any]]], clip: float | None) -> list[Any]:
    runs = [
        train_compiled("checkpointed_gpt", mode, rank=rank, accumulate=2, clip=clip, dtype=torch.float32, passes=passes)
        for mode, passes in variants
    ]
    return [(run.losses, list(run.parameters.values())) for run in runs]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("world", [2, 3])
def test_passes_and_sharding_leave_every_bit_as_it_was(ranks: Start, world: int, clip: float | None) -> None:
    off = {"prefetch": False, "stage_in_place": False}
    variants = [("zero3", off), ("zero3", {}), ("zero3", {"stage_in_place": False}), ("zero2", {})]
    for answers in ranks(world).run(train_in_variants, variants, clip):
        losses, parameters = answers[0]
        for (mode, passes), (other_losses, other) in zip(variants, answers, strict=True):
            assert losses == other_losses, (mode, passes)
            assert all(torch.equal(a, b) for a, b in zip(parameters, other, strict=True)), (mode, passes)


# ---- precision ----


def train_in_bf16(rank: int, mode: str) -> tuple[list[float], list[torch.Tensor], torch.dtype]:
    model = build("tied_gpt", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = weft.Precision(compute=torch.bfloat16, reduce=torch.float32)
    step = weft.compile(model, optimizer, mode=mode, precision=precision, seed=SEED, timeout=60)
    losses = [step(batches("tied_gpt", rank, index, 1)[0]).item() for index in range(4)]
    with step.gathered() as whole:
        values = [parameter.detach().clone() for parameter in whole.parameters()]
    return losses, values, values[0].dtype


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero3"])
def test_bf16_compute_with_fp32_masters_follows_the_same_by_hand(ranks: Start, mode: str) -> None:
    answers = ranks(2).run(train_in_bf16, mode)
    master = build("tied_gpt", torch.float32)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    states = [torch.Generator().manual_seed(SEED + rank).get_state() for rank in range(2)]
    losses: list[list[float]] = [[], []]
    for index in range(4):
        gradients = [torch.zeros_like(parameter) for parameter in master.parameters()]
        for rank in range(2):
            half = copy.deepcopy(master).to(torch.bfloat16)
            with torch.random.fork_rng():
                torch.set_rng_state(states[rank])
                loss = half(batches("tied_gpt", rank, index, 1)[0])
                loss.backward()
                states[rank] = torch.get_rng_state()
            losses[rank].append(loss.item())
            for total, parameter in zip(gradients, half.parameters(), strict=True):
                total += parameter.grad.float()  # type: ignore[union-attr]
        for parameter, gradient in zip(master.parameters(), gradients, strict=True):
            parameter.grad = gradient / 2
        optimizer.step()
    for rank, (found, values, dtype) in enumerate(answers):
        assert dtype is torch.float32
        assert found[:2] == pytest.approx(losses[rank][:2], rel=1e-6)
        assert found == pytest.approx(losses[rank], rel=2e-2)
        for value, parameter in zip(values, master.parameters(), strict=True):
            assert relative_error(value, parameter.detach()) < 2e-2


# ---- state dicts ----


def save_and_go_on(rank: int, mode: str, other: str) -> list[torch.Tensor]:
    model, _, step = compiled("tied_gpt", mode)
    for index in range(2):
        step(batches("tied_gpt", rank, index, 1)[0])
    state = step.state_dict()
    model, _, resumed = compiled("tied_gpt", other)
    resumed(batches("tied_gpt", rank, 7, 1)[0])  # a state that must be overwritten entirely
    resumed.load_state_dict(state)
    for index in range(2, 4):
        resumed(batches("tied_gpt", rank, index, 1)[0])
    with resumed.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("mode", "other"), [("zero3", "replicate"), ("replicate", "zero1"), ("zero2", "zero3")])
def test_a_state_saved_in_one_mode_goes_on_in_another(ranks: Start, mode: str, other: str) -> None:
    answers = ranks(2).run(save_and_go_on, mode, other)
    plain = ranks(2).run(train_plainly, mode)
    for answer, straight in zip(answers, plain, strict=True):
        for found, value in zip(answer, straight, strict=True):
            assert relative_error(found, value) < 1e-12


def train_plainly(rank: int, mode: str) -> list[torch.Tensor]:
    model, _, step = compiled("tied_gpt", mode)
    for index in range(4):
        step(batches("tied_gpt", rank, index, 1)[0])
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def sharded_optimizer_state(rank: int) -> str:
    _, optimizer, step = compiled("tied_gpt", "zero1")
    step(batches("tied_gpt", rank, 0, 1)[0])
    try:
        optimizer.state_dict()
    except weft.ShardedError as error:
        return str(error)
    return "no error"


def test_a_sharded_optimizers_state_dict_is_an_error_that_names_the_way(ranks: Start) -> None:
    for message in ranks(2).run(sharded_optimizer_state):
        assert "step.state_dict()" in message


# ---- a peer that is gone ----


def test_a_wait_for_a_rank_that_stopped_ends_in_an_error_that_names_it() -> None:
    pool = Ranks(2)
    try:
        message, _ = pool.run(with_short_timeout, timeout=60)
    finally:
        pool.kill()
    assert "rank 0 waited for rank 1 in the gather of bucket" in message
    assert "timeout 3 s" in message
    assert "restart from the last checkpoint" in message


def with_short_timeout(rank: int) -> str | None:
    model = build("tied_gpt")
    passes = {"shard": {"bucket_bytes": 2000}}
    step = weft.compile(model, CASES["tied_gpt"].optimizer(model), mode="zero3", timeout=3, passes=passes)
    step(batches("tied_gpt", rank, 0, 1)[0])
    if rank == 1:
        return None
    try:
        step(batches("tied_gpt", rank, 1, 1)[0])
    except weft.PeerError as error:
        first = str(error)
    try:
        step(batches("tied_gpt", rank, 2, 1)[0])
    except RuntimeError as error:
        return f"{first}\n{error}"
    return "no error"


def test_a_killed_rank_ends_the_others_with_an_error_and_no_hang() -> None:
    pool = Ranks(2)
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(die_in_step, timeout=60)
    finally:
        pool.kill()
    assert "PeerError" in str(caught.value) or "ranks [1] died" in str(caught.value)


def die_in_step(rank: int) -> None:
    _, _, step = compiled("tied_gpt", "zero2")
    step(batches("tied_gpt", rank, 0, 1)[0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for index in range(1, 50):
        step(batches("tied_gpt", rank, index, 1)[0])


def world_size(rank: int) -> int:
    return dist.get_world_size()


def test_the_pool_of_processes_really_has_several_ranks(ranks: Start) -> None:
    assert ranks(2).run(world_size) == [2, 2]


# ---- steps with fewer micro-batches ----

COUNTS = (3, 1, 2, 3)


def short_steps(rank: int, mode: str) -> tuple[list[torch.Tensor], list[float]]:
    model, _, step = compiled("tied_gpt", mode, accumulate=3, clip_norm=0.5)
    norms = []
    for index, count in enumerate(COUNTS):
        step(batches("tied_gpt", rank, index, count), micro_batches=count)
        norms.append(step.grad_norm or 0.0)
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()], norms


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "zero3"])
def test_a_step_with_fewer_micro_batches_averages_over_those_it_has(ranks: Start, mode: str) -> None:
    model = build("tied_gpt")
    optimizer = CASES["tied_gpt"].optimizer(model)
    states = [torch.Generator().manual_seed(SEED + rank).get_state() for rank in range(2)]
    expected_norms = []
    for index, count in enumerate(COUNTS):
        optimizer.zero_grad()
        for rank in range(2):
            torch.set_rng_state(states[rank])
            for batch in batches("tied_gpt", rank, index, count):
                loss = CASES["tied_gpt"].loss(model, batch) if CASES["tied_gpt"].loss else default_loss(model, batch)
                (loss / (2 * count)).backward()
            states[rank] = torch.get_rng_state()
        expected_norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    for found, norms in ranks(2).run(short_steps, mode):
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        for value, expected in zip(found, model.parameters(), strict=True):
            assert relative_error(value, expected.detach()) < 1e-12
