"""Python values that a user changes between steps: the step computes with the new ones, as eager does."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
import weft.api

WEIGHT = 1.0  # read by `weighted`, and changed by a test


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.0)
        self.scale = 1.0
        self.shift = torch.tensor(0.5)
        self.window = (0, 6)
        self.flag = False
        self.calls = 0
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(x)) * self.scale + self.shift
        if self.flag or self.calls > 2:
            y = torch.relu(y)
        if hasattr(self, "bonus"):
            y = y + self.bonus
        return y[:, self.window[0] : self.window[1]].square().mean()


class Settings:
    """An object that a loss belongs to."""

    def __init__(self) -> None:
        self.power = 2.0
        self.criterion = nn.SmoothL1Loss(beta=1.0)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.criterion(model(x) ** self.power, x.mean())


def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return WEIGHT * model(x)


def x(index: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(index))


def check_follows(change: Callable[[Model], None], loss: Any = None) -> None:
    """A step before the change and two after it have eager's losses, which the change moves."""
    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, seed=3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    values = []
    torch.manual_seed(3)
    for index in range(3):
        if index == 1:
            before = (loss or (lambda m, b: m(b)))(copy.deepcopy(other), x(index)).item()
            torch.manual_seed(3)  # undo what that drew: nothing has been drawn by the steps so far
            change(model)
            if other is not model:
                change(other)
        optimizer.zero_grad()
        expected = (loss or (lambda m, b: m(b)))(other, x(index))
        expected.backward()
        optimizer.step()
        found = step(x(index)).item()
        assert found == pytest.approx(expected.item(), rel=1e-6), index
        values.append(found)
    assert values[1] != pytest.approx(before, rel=1e-4), "the change must matter"


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 2.0), ("shift", torch.tensor(3.0)), ("window", (2, 5)), ("flag", True), ("calls", 7), ("bonus", 1.5)],
)
def test_an_attribute_that_is_changed_between_steps_is_honoured(name: str, value: Any) -> None:
    check_follows(lambda model: setattr(model, name, value))


def test_a_dropout_that_is_changed_between_steps_draws_as_eager_does() -> None:
    check_follows(lambda model: setattr(model.dropout, "p", 0.5))


def test_an_attribute_of_a_loss_kept_in_a_closure_is_honoured() -> None:
    criterion = nn.SmoothL1Loss(beta=1.0)
    check_follows(
        lambda model: setattr(criterion, "beta", 0.1), loss=lambda model, batch: criterion(model(batch), batch.mean())
    )


def test_a_value_in_the_closure_of_the_loss_is_honoured() -> None:
    weight = 1.0

    def change(model: Model) -> None:
        nonlocal weight
        weight = 3.0

    check_follows(change, loss=lambda model, batch: weight * model(batch))


def test_a_global_that_the_loss_reads_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    check_follows(lambda model: monkeypatch.setitem(globals(), "WEIGHT", 4.0), loss=weighted)


def test_an_attribute_of_the_object_of_a_bound_loss_is_honoured() -> None:
    settings = Settings()
    check_follows(lambda model: setattr(settings, "power", 3.0), loss=settings.loss)
    check_follows(lambda model: setattr(settings.criterion, "beta", 0.01), loss=settings.loss)


def test_an_argument_of_a_partial_loss_is_honoured() -> None:
    def loss(model: nn.Module, batch: torch.Tensor, options: dict[str, float], weight: float) -> torch.Tensor:
        return weight * model(batch)

    partial = functools.partial(loss, options={}, weight=1.0)
    check_follows(lambda model: partial.keywords.update(weight=2.0), loss=partial)


class Counted:
    """A model whose traces are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traces = 0
        original = weft.api.capture

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(weft.api, "capture", counting)
        torch.manual_seed(0)
        self.model = Model()
        self.step = weft.compile(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_value_that_comes_back_is_not_traced_again(counted: Counted) -> None:
    for scale in (1.0, 2.0, 1.0, 2.0, 1.0):
        counted.model.scale = scale
        counted.step(x(0))
    assert counted.traces == 2


def test_an_attribute_that_no_code_mentions_costs_one_trace(counted: Counted) -> None:
    for index in range(20):
        counted.model.unread = index
        counted.step(x(0))
    assert counted.traces == 2


def test_an_attribute_that_matters_only_later_is_honoured_then(counted: Counted) -> None:
    reference = copy.deepcopy(counted.model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for index in range(6):
        counted.model.calls = reference.calls = index
        optimizer.zero_grad()
        expected = reference(x(index))
        expected.backward()
        optimizer.step()
        assert counted.step(x(index)).item() == pytest.approx(expected.item(), rel=1e-6), index


def test_a_value_that_changes_at_every_step_is_named_in_one_warning(counted: Counted) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(15):
            counted.model.scale = 1.0 + index
            counted.step(x(0))
    messages = [str(warning.message) for warning in caught]
    assert [message for message in messages if "model.scale has changed 10 times" in message] == messages


def test_looking_at_a_thousand_modules_takes_less_than_a_hundredth_of_a_second() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1), nn.ReLU()) for _ in range(300)))
    step = weft.compile(model, torch.optim.SGD(model.parameters()), lambda m, b: F.mse_loss(m(b), b))
    started = time.perf_counter()
    for _ in range(20):
        step._ambient.version()
    assert (time.perf_counter() - started) / 20 < 0.01
