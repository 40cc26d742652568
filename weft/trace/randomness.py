"""Random ops during a trace: which draws must be equal, and that nobody reseeds.

Fake tensors draw nothing, so a generator would stand still during a trace. `RandomKeys` makes its seed a counter: each
random op records the seed it saw as its key and steps it. Activation checkpointing saves and restores generator states
around its recompute, and with them our counter, so a recomputed op gets the key of its original: two ops with one key
draw the same numbers. A seed that we did not put there means that the model reseeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch import op_schema, pytree
from weft.errors import TraceError, UnlocatedTraceError

aten = torch.ops.aten


def is_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of this op draws from a generator."""
    schema = op_schema(target)
    if schema is None or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention draws only for its dropout.
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0.0
    return True


def device_generator(device: torch.device) -> torch.Generator:
    """The default generator that random ops on a device draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


class RandomKeys(TorchDispatchMode):
    """Gives each random op a key, equal exactly for ops that must draw the same numbers."""

    def __init__(self, device: torch.device, first: int) -> None:
        super().__init__()
        self.device = device
        self.issued = {first}
        self.keys: list[int] = []
        self.first = first

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Own the default generators for the length of a trace."""
        generators = {torch.default_generator, device_generator(self.device)}
        saved = [(generator, generator.get_state()) for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(self.first)
            yield
        finally:
            for generator, state in saved:
                generator.set_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.native_batch_norm.default and args[3] is not None and args[5]:
            # Its schema does not admit that it writes the running statistics; that of this equal op does.
            return aten._native_batch_norm_legit.default(*args)
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"{func} draws from a generator of its own, which a graph cannot carry from step to step: "
                "drop the generator argument, so that it draws from PyTorch's default generator"
            )
        if func is aten.bernoulli_.float and not args[0].is_contiguous():
            result = _bernoulli_in_memory_order(*args)
        else:
            result = func(*args, **kwargs)
        device = next(
            (leaf.device for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)),
            self.device,
        )
        generator = device_generator(device)
        seed = generator.initial_seed()
        if seed not in self.issued:
            raise reseeded(seed)
        self.keys.append(seed)
        self.issued.add(seed + 1)
        generator.manual_seed(seed + 1)
        return result

    def check_not_reseeded(self) -> None:
        for generator in {torch.default_generator, device_generator(self.device)}:
            if generator.initial_seed() not in self.issued:
                raise reseeded(generator.initial_seed())


def _bernoulli_in_memory_order(tensor: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """`bernoulli_` draws as the elements lie in memory; its functional form draws for a contiguous result."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)
    drawn = aten.bernoulli.p(tensor.permute(order), p)
    return tensor.copy_(drawn.permute([order.index(dim) for dim in range(tensor.dim())]))


def reseeded(seed: int) -> UnlocatedTraceError:
    return UnlocatedTraceError(
        f"the forward or the loss reseeds PyTorch's generator (to {seed}), so every step would draw the same numbers "
        "and checkpointed layers others than they drew at first: remove the torch.manual_seed from the step"
    )
