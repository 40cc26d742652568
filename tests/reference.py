"""What must come out: the untouched model, trained by plain PyTorch in one process that plays every rank in turn."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.models import REGISTRY, batches, build
from weft.trace.capture import default_loss

SEED = 11


@dataclass
class Trained:
    """A training run's results; losses and buffers are per rank."""

    parameters: dict[str, torch.Tensor]
    buffers: list[dict[str, torch.Tensor]]
    losses: list[list[float]]
    norms: list[float] = field(default_factory=list)
    extras: list[Any] = field(default_factory=list)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train_eagerly(
    name: str,
    *,
    world: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    steps: int = 5,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    case = REGISTRY[name]
    model = build(name, dtype)
    optimizer = case.optimizer(model)
    scheduler = make_scheduler(optimizer) if case.scheduler else None
    loss_function = case.loss or default_loss
    buffers = [{key: value.clone() for key, value in model.named_buffers()} for _ in range(world)]
    states = [torch.Generator().manual_seed(SEED + rank).get_state() for rank in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    result = Trained({}, buffers, losses)
    outer = torch.get_rng_state()
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for key, value in buffers[rank].items():
                path, _, attribute = key.rpartition(".")
                setattr(model.get_submodule(path), attribute, value.clone())
            torch.set_rng_state(states[rank])
            found = []
            for batch in batches(name, rank, step, accumulate, dtype):
                output = loss_function(model, batch)
                loss, extras = output if isinstance(output, tuple) else (output, None)
                loss.backward()
                found.append(loss.detach())
                if rank == 0:
                    result.extras.append(copy.deepcopy(_detached(extras)))
            losses[rank].append(torch.stack(found).mean().item())
            states[rank] = torch.get_rng_state()
            buffers[rank] = {key: value.clone() for key, value in model.named_buffers()}
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world * accumulate
        if clip is not None:
            result.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    torch.set_rng_state(outer)
    result.parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    return result


def _detached(extras: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, extras)


def train_compiled(
    name: str,
    mode: str,
    *,
    rank: int = 0,
    accumulate: int = 1,
    clip: float | None = None,
    steps: int = 5,
    dtype: torch.dtype = torch.float64,
    poison: bool = True,
    passes: dict[str, Any] | None = None,
    bucket_bytes: int = 2000,
) -> Trained:
    """The same run through weft, on the rank that this process is."""
    import weft

    case = REGISTRY[name]
    model = build(name, dtype)
    optimizer = case.optimizer(model)
    scheduler = make_scheduler(optimizer) if case.scheduler else None
    step = weft.compile(
        model,
        optimizer,
        case.loss,
        mode=mode,
        accumulate=accumulate,
        clip_norm=clip,
        seed=SEED,
        passes={"shard": {"bucket_bytes": bucket_bytes}, **(passes or {})},
        timeout=60,
    )
    result = Trained({}, [], [[]])
    for index in range(steps):
        data = batches(name, rank, index, accumulate, dtype)
        output = step(data if accumulate > 1 else data[0])
        if poison and step._executor is not None:
            step._executor.poison = True
        loss, extras = output if isinstance(output, tuple) else (output, None)
        result.losses[0].append(loss.item())
        result.extras += extras if accumulate > 1 and extras is not None else [extras]
        if clip is not None:
            assert step.grad_norm is not None
            result.norms.append(step.grad_norm)
        if scheduler is not None:
            scheduler.step()
    with step.gathered():
        result.parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    result.buffers = [{key: value.clone() for key, value in model.named_buffers()}]
    return result


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not expected.numel():
        return 0.0
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-300) if difference else 0.0


def worst_error(found: Trained, expected: Trained, rank: int = 0) -> tuple[float, str]:
    """The largest relative error over losses, norms, parameters and this rank's buffers, and where it is."""
    errors = {"losses": relative_error(torch.tensor(found.losses[0]), torch.tensor(expected.losses[rank]))}
    if expected.norms:
        errors["norms"] = relative_error(torch.tensor(found.norms), torch.tensor(expected.norms))
    for kind, mine, theirs in (
        ("parameter", found.parameters, expected.parameters),
        ("buffer", found.buffers[0], expected.buffers[rank]),
    ):
        assert mine.keys() == theirs.keys()
        for key in mine:
            errors[f"{kind} {key}"] = relative_error(mine[key], theirs[key])
    where = max(errors, key=lambda key: (errors[key] != errors[key], errors[key]))  # a NaN is the worst of all
    return errors[where], where
