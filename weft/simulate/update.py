"""What an optimizer takes while it updates: temporaries, found by a trial on a few numbers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch import pytree, storage_key
from weft.state.optimizer import group_options, run_step, shadow

ELEMENTS = 4096


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that ops make, and the most that was alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.known.add(storage_key(tensor))
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.known:
                key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
                self.known.add(key)
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._freed, key, nbytes)
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def update_elements(optimizer: torch.optim.Optimizer, fused: bool, device: torch.device) -> float:
    """The most elements of temporaries, per element of a parameter, that an update needs at once."""
    options = group_options(optimizer.param_groups[0])
    if fused:
        options = {**options, "fused": True}
    twin = shadow(optimizer)
    tensor = torch.zeros(ELEMENTS, device=device)
    most = 0
    for _ in range(2):  # the first step also makes the state
        tensor.grad = torch.ones(ELEMENTS, device=device)
        with LiveBytes() as live:
            run_step(twin, options, [tensor])
        most = live.most
    return most // tensor.nbytes
