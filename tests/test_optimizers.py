"""Every optimizer of torch.optim trains through weft as it does in eager PyTorch, and its state is the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR

import weft

MODES = ("replicate", "zero1", "zero2", "zero3")
ZERO_MODES = ("zero1", "zero2", "zero3")
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Model(nn.Module):
    """Sizes that are no multiple of anything, and few enough to look at."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, bias=bias), nn.Linear(7, 3, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


def build(bias: bool = True, dtype: torch.dtype = torch.float64) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(bias).to(dtype)


def batch(index: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return tuple(torch.randn(4, size, generator=generator, dtype=dtype) for size in (5, 3))  # type: ignore[return-value]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: range,
    scheduler: LambdaLR | None = None,
    take: Callable[[int], Any] = batch,
) -> list[torch.Tensor]:
    """Plain PyTorch."""
    losses = []
    for index in batches:

        def closure(index: int = index) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*take(index))
            loss.backward()
            return loss

        if isinstance(optimizer, LBFGS):
            losses.append(torch.as_tensor(optimizer.step(closure)).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad()
    return losses


def parameters(step: weft.Step) -> dict[str, torch.Tensor]:
    with step.gathered() as model:
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_trained_alike(step: weft.Step, eager: nn.Module) -> None:
    expected = {name: value.detach() for name, value in eager.named_parameters()}
    torch.testing.assert_close(parameters(step), expected, **TOLERANCE)


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any], exactly: bool = False) -> None:
    """Two `optimizer.state_dict()`s: the same groups, entries, shapes and dtypes, and values that agree."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    tolerance = {"rtol": 0, "atol": 0} if exactly else TOLERANCE
    for index, entries in expected["state"].items():
        mine = found["state"][index]
        assert mine.keys() == entries.keys()
        for key, value in entries.items():
            assert type(mine[key]) is type(value), key
            torch.testing.assert_close(mine[key], value, **tolerance, msg=lambda text, key=key: f"{key}: {text}")


# ---- the elementwise ones -------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9),
    "SGD dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "SGD nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": partial(SGD, lr=0.1, momentum=0.5, maximize=True),
    "SGD foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(Adam, lr=0.01),
    "Adam amsgrad": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam maximize": partial(Adam, lr=0.01, maximize=True),
    "Adam foreach": partial(Adam, lr=0.01, foreach=True),
    "Adam fused": partial(Adam, lr=0.01, fused=True),
    "Adam tensor lr": partial(Adam, lr=torch.tensor(0.01)),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": partial(AdamW, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
    "AdamW no foreach": partial(AdamW, lr=0.01, foreach=False),
    "AdamW foreach": partial(AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(AdamW, lr=0.01, fused=True),
    "NAdam": partial(NAdam, lr=0.01, weight_decay=0.1),
    "NAdam decoupled": partial(NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": partial(RAdam, lr=0.01, betas=(0.5, 0.6)),
    "RAdam decoupled": partial(RAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "Adamax": partial(Adamax, lr=0.01, weight_decay=0.1),
    "Adagrad": partial(Adagrad, lr=0.1, lr_decay=0.1),
    "Adagrad initial": partial(Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "Adagrad foreach": partial(Adagrad, lr=0.1, initial_accumulator_value=0.3, foreach=True),
    "Adagrad fused": partial(Adagrad, lr=0.1, fused=True),
    "Adadelta": partial(Adadelta, lr=0.5, weight_decay=0.1),
    "RMSprop": partial(RMSprop, lr=0.01),
    "RMSprop centered": partial(RMSprop, lr=0.01, centered=True, momentum=0.5, weight_decay=0.1),
    "Rprop": partial(Rprop, lr=0.01),
    "ASGD": partial(ASGD, lr=0.01, t0=1.0, lambd=0.01, weight_decay=0.1),
    "ASGD foreach": partial(ASGD, lr=0.01, t0=1.0, foreach=True),
}


def two_groups(kind: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """Weights and biases in a group each, the biases with a learning rate of their own."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    settings = copy.deepcopy(kind.keywords)  # type: ignore[attr-defined]  (a learning rate may be a tensor)
    return kind([{"params": weights}, {"params": biases, "lr": settings["lr"] * 0.5}], **settings)


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, [lambda epoch: 1 / (1 + epoch), lambda epoch: 0.5**epoch])


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_optimizer_trains_as_in_eager(name: str, mode: str) -> None:
    model, eager = build(), build()
    theirs = two_groups(ELEMENTWISE[name], eager)
    expected = train(eager, theirs, range(4), halving(theirs))
    optimizer = two_groups(ELEMENTWISE[name], model)
    scheduler = halving(optimizer)
    step = weft.compile(model, optimizer, mode=mode)
    losses = []
    for index in range(4):
        losses.append(step(batch(index)))
        scheduler.step()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), **TOLERANCE)
    assert_trained_alike(step, eager)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


TAKEN_OVER = [(name, "replicate") for name in ELEMENTWISE]
TAKEN_OVER += [(name, "zero3") for name in ("SGD nesterov", "AdamW", "AdamW fused", "NAdam", "Adagrad initial", "ASGD")]


@pytest.mark.parametrize(("name", "mode"), TAKEN_OVER)
def test_state_from_before_compile_is_taken_over_exactly(name: str, mode: str) -> None:
    model, eager = build(), build()
    optimizer, theirs = two_groups(ELEMENTWISE[name], model), two_groups(ELEMENTWISE[name], eager)
    train(model, optimizer, range(2))
    train(eager, theirs, range(2))
    step = weft.compile(model, optimizer, mode=mode)
    step.evaluate(batch(2))  # moves everything into weft's own memory
    assert_same_state(optimizer.state_dict(), theirs.state_dict(), exactly=True)
    train(eager, theirs, range(2, 4))
    for index in range(2, 4):
        step(batch(index))
    assert_trained_alike(step, eager)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_fp32_training_stays_within_rounding_of_eager(mode: str) -> None:
    model, eager = build(dtype=torch.float32), build(dtype=torch.float32)
    take = partial(batch, dtype=torch.float32)
    train(eager, AdamW(eager.parameters(), lr=0.01), range(4), take=take)
    step = weft.compile(model, AdamW(model.parameters(), lr=0.01), mode=mode)
    for index in range(4):
        step(take(index))
    torch.testing.assert_close(parameters(step), dict(eager.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_hyperparameters_are_those_of_the_groups_when_the_step_is_called(mode: str) -> None:
    model, eager = build(), build()
    optimizer, theirs = SGD(model.parameters(), lr=0.1), SGD(eager.parameters(), lr=0.1)
    step = weft.compile(model, optimizer, mode=mode)
    for index, (lr, decay) in enumerate([(0.1, 0.0), (0.0, 0.5), (0.3, 0.2)]):
        for group in (*optimizer.param_groups, *theirs.param_groups):
            group.update(lr=lr, weight_decay=decay)
        step(batch(index))
        train(eager, theirs, range(index, index + 1))
    assert_trained_alike(step, eager)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_the_optimizer_does_not_hold_stay_as_they_are(mode: str) -> None:
    model, eager = build(), build()
    before = {name: value.detach().clone() for name, value in model.first.named_parameters()}
    train(eager, AdamW(eager.second.parameters(), lr=0.01), range(3))
    step = weft.compile(model, AdamW(model.second.parameters(), lr=0.01), mode=mode)
    for index in range(3):
        step(batch(index))
    assert_trained_alike(step, eager)
    with step.gathered():
        assert all(torch.equal(value, before[name]) for name, value in model.first.named_parameters())


class Signs(Optimizer):
    """An optimizer of the user's own: elementwise, with a counter that is no tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.sub_(state["sum"].sign() * group["lr"] / state["calls"])


@pytest.mark.parametrize("mode", MODES)
def test_an_elementwise_optimizer_of_the_users_own_trains_as_in_eager(mode: str) -> None:
    model, eager = build(), build()
    theirs, optimizer = Signs(eager.parameters(), lr=0.1), Signs(model.parameters(), lr=0.1)
    train(eager, theirs, range(4))
    step = weft.compile(model, optimizer, mode=mode)
    for index in range(4):
        step(batch(index))
    assert_trained_alike(step, eager)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


class Normed(Optimizer):
    """Not elementwise: the size of an update depends on the whole gradient of a parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * group["lr"])


# ---- the others, which need whole tensors ---------------------------------------------------------------------------

WHOLE: dict[str, Callable[..., Optimizer]] = {
    "Muon": partial(Muon, lr=0.05, weight_decay=0.1),
    "Adafactor": partial(Adafactor, lr=0.05),
    "LBFGS": partial(LBFGS, lr=0.5, max_iter=3),
    "LBFGS strong_wolfe": partial(LBFGS, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "a norm per parameter": partial(Normed, lr=0.1),
}


@pytest.mark.parametrize("mode", ZERO_MODES)
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_is_refused_where_they_are_cut(name: str, mode: str) -> None:
    model = build(bias=False)
    optimizer = WHOLE[name](model.parameters())
    with pytest.raises(ValueError, match="mode='replicate'") as caught:
        weft.compile(model, optimizer, mode=mode)
    assert type(optimizer).__name__ in str(caught.value)
    assert f"mode={mode!r}" in str(caught.value)


@pytest.mark.parametrize("mode", ["replicate", "auto"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_trains_as_in_eager_where_they_are_whole(name: str, mode: str) -> None:
    model, eager = build(bias=False), build(bias=False)
    optimizer, theirs = WHOLE[name](model.parameters()), WHOLE[name](eager.parameters())
    scheduler, their_scheduler = (LambdaLR(it, lambda epoch: 1 / (1 + epoch)) for it in (optimizer, theirs))
    expected = train(eager, theirs, range(2), their_scheduler)
    step = weft.compile(model, optimizer, mode=mode)
    losses = []
    for index in range(2):
        losses.append(step(batch(index)))
        scheduler.step()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), **TOLERANCE)
    assert_trained_alike(step, eager)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", WHOLE)
def test_the_state_of_a_whole_optimizer_survives_a_checkpoint(name: str) -> None:
    model = build(bias=False)
    step = weft.compile(model, WHOLE[name](model.parameters()))
    for index in range(2):
        step(batch(index))
    state = step.state_dict()
    other = Model(bias=False).double()
    resumed = weft.compile(other, WHOLE[name](other.parameters()))
    resumed(batch(7))
    resumed.load_state_dict(state)
    for index in range(2, 4):
        assert torch.equal(step(batch(index)), resumed(batch(index)))
    torch.testing.assert_close(parameters(resumed), parameters(step), rtol=0, atol=0)


# ---- the optimizer as the user's object -----------------------------------------------------------------------------


def test_a_parameter_of_another_model_is_an_error_that_shows_its_group_and_shape() -> None:
    model = build()
    stray = nn.Parameter(torch.zeros(11, 2))
    optimizer = SGD([{"params": model.parameters()}, {"params": [stray]}], lr=0.1)
    with pytest.raises(ValueError, match=r"group 1 holds a parameter of shape \[11, 2\]"):
        weft.compile(model, optimizer)


def test_step_hooks_on_the_optimizer_are_refused() -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        weft.compile(model, optimizer)


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_a_group_added_after_compile_is_an_error(mode: str) -> None:
    model = build()
    optimizer = SGD(model.first.parameters(), lr=0.1)
    step = weft.compile(model, optimizer, mode=mode)
    step(batch(0))
    optimizer.add_param_group({"params": list(model.second.parameters())})
    with pytest.raises((RuntimeError, ValueError)):
        step(batch(1))


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("mode", ["replicate", "zero3"])
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW", "AdamW fused", "NAdam", "Adagrad initial", "ASGD"])
def test_a_loaded_state_dict_is_honoured(name: str, mode: str, started: bool) -> None:
    source = build()
    saving = two_groups(ELEMENTWISE[name], source)
    train(source, saving, range(3))
    saving.param_groups[0]["lr"] = 0.017
    saved = copy.deepcopy(saving.state_dict())

    # PyTorch casts some of the state when it loads it, so eager has to load it too.
    eager, model = build(), build()
    theirs, optimizer = two_groups(ELEMENTWISE[name], eager), two_groups(ELEMENTWISE[name], model)
    step = weft.compile(model, optimizer, mode=mode)
    if started:
        step(batch(9))
    eager.load_state_dict(source.state_dict())
    with step.gathered():
        model.load_state_dict(source.state_dict())
    theirs.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same_state(optimizer.state_dict(), theirs.state_dict(), exactly=True)
    train(eager, theirs, range(3, 6))
    for index in range(3, 6):
        step(batch(index))
    assert_trained_alike(step, eager)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
# Not NAdam: loading casts its running product to the parameters' dtype, so that plain PyTorch itself goes on otherwise.
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "ASGD"])
def test_a_state_dict_goes_back_into_plain_pytorch(name: str, mode: str) -> None:
    model = build()
    optimizer = two_groups(ELEMENTWISE[name], model)
    step = weft.compile(model, optimizer, mode=mode)
    for index in range(3):
        step(batch(index))
    plain = build()
    plain.load_state_dict(parameters(step))
    other = two_groups(ELEMENTWISE[name], plain)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, other, range(3, 5))
    for index in range(3, 5):
        step(batch(index))
    assert_trained_alike(step, plain)


def test_no_two_entries_of_a_state_dict_are_one_tensor() -> None:
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = weft.compile(model, optimizer)
    step(batch(0))
    tensors = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    assert len({value.data_ptr() for value in tensors}) == len(tensors) == 12


def test_a_state_dict_taken_between_steps_changes_nothing() -> None:
    model, eager = build(), build()
    theirs, optimizer = AdamW(eager.parameters(), lr=0.01), AdamW(model.parameters(), lr=0.01)
    train(eager, theirs, range(4))
    step = weft.compile(model, optimizer, mode="zero1")
    for index in range(4):
        step(batch(index))
        optimizer.state_dict()
        step.state_dict()
    assert_trained_alike(step, eager)


# ---- parameters that a step does not reach --------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """Which head a batch trains."""

    x: torch.Tensor
    head: str
    kind: str = field(default="route")


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, route: Route) -> torch.Tensor:
        return self.heads[route.head](torch.relu(self.body(route.x))).square().mean()


def two_heads() -> TwoHeads:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return TwoHeads().double()


ROUTES = "aabab"


def route(index: int) -> Route:
    generator = torch.Generator().manual_seed(index)
    return Route(torch.randn(4, 5, generator=generator, dtype=torch.float64), ROUTES[index])


REACHING: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.3),
    "Adam fused": partial(Adam, lr=0.01, weight_decay=0.3, fused=True),
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.3),
    "NAdam": partial(NAdam, lr=0.01, weight_decay=0.3),
    "Adagrad": partial(Adagrad, lr=0.1, lr_decay=0.2, weight_decay=0.3),
    "ASGD": partial(ASGD, lr=0.01, t0=1.0),
    "Normed": partial(Normed, lr=0.1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REACHING)
def test_a_parameter_that_a_step_does_not_reach_is_untouched(name: str, mode: str) -> None:
    if name == "Normed" and mode != "replicate":
        pytest.skip("refused: it needs whole tensors")
    model, eager = two_heads(), two_heads()
    optimizer, theirs = REACHING[name](model.parameters()), REACHING[name](eager.parameters())
    step = weft.compile(model, optimizer, lambda model, batch: model(batch), mode=mode)
    for index, head in enumerate(ROUTES):
        before = parameters(step)
        step(route(index))
        train(eager, theirs, range(index, index + 1), take=lambda i: (route(i),))
        after = parameters(step)
        for key, value in after.items():
            reached = key.startswith(("body", f"heads.{head}"))
            assert torch.equal(value, before[key]) != reached, key
    assert_trained_alike(step, eager)
    assert_same_state(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_counts_its_own_steps(mode: str) -> None:
    model = two_heads()
    step = weft.compile(model, AdamW(model.parameters(), lr=0.01), lambda model, batch: model(batch), mode=mode)
    for index in range(len(ROUTES)):
        step(route(index))
    counts = {name: int(state["step"]) for name, state in step.state_dict()["optimizer"]["state"].items() if state}
    assert counts == {
        "body.weight": 5,
        "body.bias": 5,
        "heads.a.weight": 3,
        "heads.a.bias": 3,
        "heads.b.weight": 2,
        "heads.b.bias": 2,
    }


# ---- step.state_dict() ----------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and batch norm, so that a checkpoint has all that it can have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(F.dropout(self.norm(self.first(x)), 0.3, self.training)), y)


def noisy(seed: int) -> Noisy:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Noisy().double()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("source", "target"), [("zero3", "replicate"), ("replicate", "zero3"), ("zero1", "zero2")])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "NAdam", "ASGD"])
def test_a_checkpoint_continues_exactly_in_another_mode(name: str, source: str, target: str, started: bool) -> None:
    model = noisy(1)
    optimizer = two_groups(ELEMENTWISE[name], model)
    step = weft.compile(model, optimizer, mode=source, seed=1)
    scheduler = halving(optimizer)
    for index in range(3):
        step(batch(index))
        scheduler.step()
    state = step.state_dict()

    other = noisy(2)
    resumed_optimizer = two_groups(ELEMENTWISE[name], other)
    resumed = weft.compile(other, resumed_optimizer, mode=target, seed=2)
    if started:
        resumed(batch(9))
    resumed.load_state_dict(state)
    assert [group["lr"] for group in resumed_optimizer.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    for index in range(3, 6):
        assert torch.equal(step(batch(index)), resumed(batch(index)))
    torch.testing.assert_close(parameters(resumed), parameters(step), rtol=0, atol=0)
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)


def same(one: Any, other: Any) -> bool:
    """Whether two nestings are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def test_a_checkpoint_is_not_changed_by_later_steps() -> None:
    model = noisy(1)
    step = weft.compile(model, AdamW(model.parameters(), lr=0.01), mode="replicate")
    step(batch(0))
    state = step.state_dict()
    before = copy.deepcopy(state)
    step(batch(1))
    assert same(state, before)
    assert not same(step.state_dict(), before)


def test_a_checkpoint_may_be_saved_and_loaded_by_torch(tmp_path: Any) -> None:
    model = noisy(1)
    step = weft.compile(model, AdamW(model.parameters(), lr=0.01), mode="zero3")
    step(batch(0))
    torch.save(step.state_dict(), tmp_path / "state.pt")
    expected = [step(batch(index)) for index in (1, 2)]
    step.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(step(batch(index)), loss) for index, loss in zip((1, 2), expected, strict=True))


@pytest.mark.parametrize("spoil", ["lacks", "another model", "groups"])
def test_a_checkpoint_that_does_not_fit_is_an_error(spoil: str) -> None:
    model = noisy(1)
    step = weft.compile(model, AdamW(model.parameters(), lr=0.01))
    step(batch(0))
    state = step.state_dict()
    if spoil == "lacks":
        del state["random"]
    elif spoil == "another model":
        state["optimizer"]["state"]["third.weight"] = state["optimizer"]["state"]["first.weight"]
    else:
        state["optimizer"]["groups"] *= 2
    with pytest.raises(ValueError, match=spoil):
        step.load_state_dict(state)
