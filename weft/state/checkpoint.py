"""Optimizer state as a user knows it: per parameter, in full shape, wherever its pieces lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from weft._torch import pytree
from weft.state.shards import BucketState


class Gathering(Protocol):
    """The part of the collectives that this needs."""

    world: int

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Any: ...
    def wait(self, pending: Any, what: str) -> None: ...
    def gather_objects(self, value: Any) -> list[Any]: ...


def optimizer_state(
    source: Sequence[BucketState] | Mapping[int, Mapping[str, Any]],
    names: Sequence[str],
    collectives: Gathering,
    *,
    copy: bool = True,
) -> dict[str, dict[str, Any]]:
    """Every parameter's optimizer state by name: on the CPU and owned by the caller, or with `copy=False` in place."""
    if isinstance(source, Mapping):
        found = {names[index]: dict(state) for index, state in source.items()}
    else:
        found = {}
        for state in source:
            if state.optimizer is not None:
                with state.state_in_memory():
                    found.update(_of_bucket(state, collectives))
    if not copy:
        return found
    return {name: owned_copy(state, torch.device("cpu")) for name, state in found.items()}


def owned_copy(state: Any, device: torch.device | None) -> Any:
    """A state with tensors of its own, lists of tensors included; on `device`, or each where it is."""
    return pytree.tree_map(
        lambda v: v.detach().to(device or v.device, copy=True) if isinstance(v, torch.Tensor) else v, state
    )


def _of_bucket(state: BucketState, collectives: Gathering) -> dict[str, dict[str, Any]]:
    assert state.optimizer is not None
    bucket, pieces = state.bucket, state.optimizer.export_state()
    scalars = {
        parameter: {key: (None, value.dtype) if _elementwise(value) else (value, None) for key, value in piece.items()}
        for parameter, piece in pieces.items()
    }
    # A parameter may lie on other ranks entirely, so everyone tells what it knows.
    everywhere: dict[int, dict[str, Any]] = {}
    for answer in collectives.gather_objects(scalars) if bucket.scatter else [scalars]:
        for parameter, known in answer.items():
            everywhere.setdefault(parameter, known)
    flats: dict[tuple[str, torch.dtype], torch.Tensor] = {}
    for parameter in sorted(everywhere):
        for key, (_, dtype) in everywhere[parameter].items():
            if dtype is not None and (key, dtype) not in flats:
                flats[key, dtype] = _whole(state, pieces, key, dtype, collectives)
    return {
        slot.name: {
            key: owned_copy(value, None) if dtype is None else slot.view(flats[key, dtype])
            for key, (value, dtype) in everywhere[slot.parameter].items()
        }
        for slot in bucket.slots
        if slot.parameter in everywhere
    }


def _whole(
    state: BucketState, pieces: Mapping[int, Mapping[str, Any]], key: str, dtype: torch.dtype, collectives: Gathering
) -> torch.Tensor:
    """One kind of state of a whole bucket."""
    bucket = state.bucket
    mine = torch.zeros(state.master.numel(), dtype=dtype, device=state.master.device)
    for slot in bucket.slots:
        start, stop = max(slot.offset, state.own.start), min(slot.end, state.own.stop)
        if start < stop and _elementwise(pieces.get(slot.parameter, {}).get(key)):
            mine[start - state.own.start : stop - state.own.start] = pieces[slot.parameter][key]
    if not bucket.scatter:
        return mine
    whole = torch.empty(bucket.numel, dtype=dtype, device=mine.device)
    collectives.wait(collectives.gather(whole, mine), f"the optimizer state of {bucket.describe()}")
    return whole


def _elementwise(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def check(state: Mapping[str, Any], names: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
    """Raise unless a state dict fits this model and optimizer."""
    missing = {"model", "optimizer", "random"} - set(state)
    if missing:
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}: pass what step.state_dict() returned")
    unknown = set(state["optimizer"]["state"]) - set(names)
    if unknown:
        raise ValueError(f"the state is of another model: it has optimizer state for {sorted(unknown)[:3]}")
    if len(state["optimizer"]["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(state['optimizer']['groups'])} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}"
        )
