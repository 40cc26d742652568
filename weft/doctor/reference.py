"""One training step in plain eager PyTorch, from the same state as a compiled one: what must come out of it.

The user's own module objects run, with parameters and buffers put in for the length of the step: what their forward
reads from lists, configurations and globals is then what it reads in plain PyTorch, however it changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft._torch import plain_tensor_access, pytree
from weft.run.collectives import Local
from weft.state.checks import buffer_slots
from weft.state.optimizer import needs_closure
from weft.trace.capture import Loss, cast_inputs
from weft.trace.guards import restored
from weft.trace.randomness import device_generator
from weft.trace.signature import split_batch


@dataclass
class Outcome:
    """What a step left behind: this rank's loss and buffers, everyone's parameters, optimizer state and norm."""

    loss: torch.Tensor
    norm: float | None
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]


@dataclass
class EagerStep:
    """A step to be run eagerly.

    Attributes:
        model, loss, optimizer: the user's own; none of them is changed.
        state: `step.state_dict()` before the step.
        clip_norm: as given to `weft.compile`.
        compute, masters: dtypes of parameters in forward (None: their own) and of the values that are updated, by name.
        collectives: of the ranks that train together.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    state: Mapping[str, Any]
    clip_norm: float | None
    compute: torch.dtype | None
    masters: Mapping[str, torch.dtype]
    collectives: Local

    def __post_init__(self) -> None:
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        device = next(self.model.parameters()).device
        self.device = device
        self.parameters: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for name, parameter in self.model.named_parameters():
            value = self.state["model"][name].to(device, self.masters[name], copy=True)
            self.parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            memo[id(parameter)] = self.parameters[name]
        self.updater = _copy_optimizer(self.optimizer, memo)
        for name, values in self.state["optimizer"]["state"].items():
            self.updater.state[self.parameters[name]] = pytree.tree_map(
                lambda v: v.to(device, copy=True) if isinstance(v, torch.Tensor) and v.dim() else copy.copy(v), values
            )
        self.buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self.random_state = self.state["random"].clone()
        self.gradients: dict[str, torch.Tensor] = {}

    def start_from_rank_0(self) -> None:
        """Before the first step: every rank has rank 0's values, as DistributedDataParallel gives them."""
        for name, value in (*self.parameters.items(), *self.buffers.items()):
            self.collectives.broadcast(value.detach(), f"the first values of {name}")

    def run(self, micro_batches: Sequence[Any]) -> Outcome:
        """The step: gradients averaged over ranks and micro-batches, clipped, and the user's optimizer."""
        answered: list[tuple[torch.Tensor, float | None]] = []

        def closure() -> torch.Tensor:
            loss = self._gradients(micro_batches)
            norm = None
            if self.clip_norm is not None:
                norm = float(nn.utils.clip_grad_norm_(list(self.parameters.values()), self.clip_norm))
            self.gradients = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
            answered.append((loss, norm))
            mean = loss.double().clone()
            self._all_reduce(mean, "the mean of the losses")
            return (mean / self.collectives.world).to(loss.dtype)

        if needs_closure(type(self.updater).step):
            self.updater.step(closure)  # type: ignore[arg-type]  # torch itself returns tensors
        else:
            closure()
            self.updater.step()
        return Outcome(
            answered[0][0],  # the loss at which the step began, where the optimizer asked for several
            answered[-1][1],
            {name: parameter.detach() for name, parameter in self.parameters.items()},
            self.buffers,
            {self._name(p): dict(state) for p, state in self.updater.state.items()},
        )

    def _name(self, parameter: torch.Tensor) -> str:
        return next(name for name, mine in self.parameters.items() if mine is parameter)

    def _gradients(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        self.updater.zero_grad()
        generator = device_generator(self.device)
        outer = generator.get_state()
        generator.set_state(self.random_state)
        losses = []
        working = {name: self._working(parameter) for name, parameter in self.parameters.items()}
        try:
            with self._in_the_model(working), cast_inputs(self.model, self.compute):
                for batch in micro_batches:
                    output = self.loss(self.model, copied(batch))
                    loss = output[0] if isinstance(output, tuple) else output
                    loss.backward()
                    losses.append(loss.detach())
        finally:
            self.random_state = generator.get_state()
            generator.set_state(outer)
        reached = [working[name].grad is not None for name in self.parameters]
        anywhere = [any(flags) for flags in zip(*self.collectives.gather_objects(reached), strict=True)]
        for (name, parameter), some in zip(self.parameters.items(), anywhere, strict=True):
            if some:
                gradient = working[name].grad
                gradient = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
                self._all_reduce(gradient, f"the gradient of {name}")
                parameter.grad = gradient / (self.collectives.world * len(micro_batches))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _working(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter in the dtype in which forward and backward run."""
        if self.compute is None or not parameter.is_floating_point():
            return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        return nn.Parameter(parameter.detach().to(self.compute), requires_grad=parameter.requires_grad)

    def _all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        self.collectives.wait(self.collectives.all_reduce(tensor), what)

    @contextmanager
    def _in_the_model(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Parameters and buffers of this step in the user's modules, which are as before afterwards."""
        slots = buffer_slots(self.model)
        with restored(self.model):
            with plain_tensor_access():
                for module in self.model.modules():
                    for name, parameter in list(module._parameters.items()):
                        if parameter is not None:
                            setattr(module, name, parameters[self.names[id(parameter)]])
            for path, module, name in slots:
                module._buffers[name] = self.buffers[path].clone()
            yield
            for path, module, name in slots:
                self.buffers[path] = module._buffers[name].detach()  # type: ignore[union-attr]


def copied(batch: Any) -> Any:
    """A batch whose tensors forward may change."""
    tensors, spec = split_batch(batch)
    return spec.join([tensor.detach().clone() for tensor in tensors])


def _copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters, by the memo; its state is still empty."""
    state, optimizer.state = optimizer.state, type(optimizer.state)(optimizer.state.default_factory)
    try:
        twin = copy.deepcopy(optimizer, memo)
        for name, value in vars(optimizer).items():
            # Optimizers of one's own may keep more than torch's copying knows of (LBFGS its list of parameters).
            if name not in vars(twin) and not callable(value):
                setattr(twin, name, copy.deepcopy(value, memo))
    finally:
        optimizer.state = state
    return twin
