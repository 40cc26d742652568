"""The first steps against the prediction: what they teach, one warning where it was wrong, one chance to plan again."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.predict.costs import Costs
from weft.simulate.timeline import Timeline

SETTLING = 3  # steps that fill caches, bind memory and start what steady steps find in flight
ENOUGH = 6
NEAR, WRONG = 0.03, 0.15  # of the prediction: what is near enough to leave the plan, and what is worth a warning
LARGEST_FACTOR, HALVINGS = 8.0, 10


@dataclass
class Measured:
    """How long steps took, until there are enough of them."""

    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    steps: int = 0
    compared: bool = False  # what was planned again is measured too, and left as it is

    def add(self, seconds: float, waited: float) -> bool:
        """Note a step; True with the one that makes them enough: the same step on every rank."""
        self.steps += 1
        if self.steps <= SETTLING or len(self.times) == ENOUGH:
            return False
        self.times.append(seconds)
        self.waits.append(waited)
        return len(self.times) == ENOUGH and not self.compared

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.times) if len(self.times) == ENOUGH else None

    @property
    def waited(self) -> float:
        return statistics.median(self.waits)


def scaled_compute(costs: Costs, predicted: Timeline, seconds: float, waited: float) -> Costs:
    """Costs whose compute is what was measured: `waited` of a step's `seconds` passed in waiting for others."""
    if seconds <= waited or predicted.compute_seconds <= 0:
        return costs
    return costs.scaled((seconds - waited) / predicted.compute_seconds)


def links_factor(costs: Costs, predict: Callable[[Costs], Timeline], seconds: float) -> float:
    """How much slower (or faster) messages would have to be for the step to be predicted as it was measured."""
    low, high = 1 / LARGEST_FACTOR, LARGEST_FACTOR
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if predict(costs.with_links(costs.links.scaled(middle))).seconds < seconds:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)
