"""How many bytes each mode needs on a rank, and which mode is the fastest that fits: by arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.state.layout import ParameterInfo

WINDOW = 4  # buckets in use at a time: being computed with, being gathered, two being reduced


@dataclass(frozen=True)
class ModeCost:
    """A mode's needs on one rank; activations come on top and are the same in every mode."""

    mode: str
    state_bytes: int  # parameters, gradients, optimizer state and the buckets in use
    wire_bytes: int  # sent by a rank in a step
    update_elements: int


def mode_costs(
    parameters: Sequence[ParameterInfo],
    *,
    world: int,
    accumulate: int,
    bucket_bytes: int,
    state_elements: float,
) -> list[ModeCost]:
    """The four modes' costs, in the order replicate, zero1, zero2, zero3."""
    trained = [p for p in parameters if p.group is not None]
    frozen = sum(p.numel * p.dtype.itemsize for p in parameters if p.group is None)
    elements = sum(p.numel for p in trained)
    compute = sum(p.numel * p.compute.itemsize for p in trained)
    reduce = sum(p.numel * p.reduce.itemsize for p in trained)
    master = sum(p.numel * p.master.itemsize for p in trained)
    extra_master = sum(p.numel * p.master.itemsize for p in trained if p.master != p.compute)
    optimizer = int(master * state_elements)
    largest = max((p.numel * max(p.compute.itemsize, p.reduce.itemsize) for p in parameters), default=0)
    window = min(WINDOW * max(bucket_bytes, largest), compute + reduce + frozen)
    share = (world - 1) / world

    def cost(mode: str, state: float, wire: float, updated: float) -> ModeCost:
        return ModeCost(mode, int(state), int(wire), int(updated))

    whole_gradients = reduce if accumulate > 1 else min(reduce, window)
    slice_gradients = (reduce / world if accumulate > 1 else 0) + min(reduce, window)
    gathers = 2 * accumulate  # forward and backward of every micro-step
    return [
        cost(
            "replicate",
            compute + extra_master + reduce + optimizer + frozen,
            2 * share * reduce,
            elements,
        ),
        cost(
            "zero1",
            compute + extra_master / world + whole_gradients + optimizer / world + frozen,
            share * (reduce + compute),
            elements / world,
        ),
        cost(
            "zero2",
            compute + extra_master / world + slice_gradients + optimizer / world + frozen,
            share * (accumulate * reduce + compute),
            elements / world,
        ),
        cost(
            "zero3",
            (master + optimizer + frozen) / world + slice_gradients + window,
            share * (accumulate * reduce + gathers * (compute + frozen)),
            elements / world,
        ),
    ]


def choose_mode(costs: Sequence[ModeCost], budget: int) -> ModeCost:
    """The mode that sends least, then updates least, among those that fit."""
    fitting = [cost for cost in costs if cost.state_bytes <= budget]
    if not fitting:
        least = min(costs, key=lambda cost: cost.state_bytes)
        raise ValueError(
            f"memory={budget} bytes a rank is too little for any mode: {least.mode} needs the least, "
            f"{least.state_bytes} bytes of parameters, gradients and optimizer state, and activations come on top. "
            f"Give memory={least.state_bytes} or more, or more ranks"
        )
    return min(fitting, key=lambda cost: (cost.wire_bytes, cost.update_elements))
