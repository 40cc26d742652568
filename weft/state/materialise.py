"""Give a model on the meta device its first values, a rank's slices alone.

`Step` calls this before its first step. Where values come from is the business of `initial` (the model's own
initialisation) and `pretrained` (a checkpoint); here is who of them is asked, and for which part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weft.state.checks import dense_stride
from weft.state.initial import Initialisation
from weft.state.layout import Bucket, Layout
from weft.state.pretrained import Pretrained
from weft.state.shards import flatten


class Broadcasting(Protocol):
    """The part of the collectives that this needs."""

    rank: int

    def broadcast(self, tensor: torch.Tensor, what: str) -> None: ...
    def gather_objects(self, value: Any) -> list[Any]: ...


class FirstValues:
    """Where a model's values come from at its first step."""

    def __init__(self, model: nn.Module, init: Callable[[nn.Module], Any] | Path | None, device: torch.device) -> None:
        self.model, self.init, self.device = model, init, device
        self.pretrained = Pretrained(init, model) if isinstance(init, Path) else None
        tensors = [*model.parameters(), *model.buffers()]
        self.pending = any(tensor.is_meta for tensor in tensors)
        self.initialisation: Initialisation | None = None
        if self.pretrained is not None:
            self.pretrained.load_into_real()
        elif init is not None and not self.pending:
            warnings.warn("init= is a function and no tensor of the model is on the meta device: ignored", stacklevel=4)

    def begin(self, layout: Layout, seed: int, collectives: Broadcasting) -> None:
        """Read what the model's initialisation does, and give buffers their values."""
        if not self.pending:
            return
        (seed, *_) = collectives.gather_objects(seed)
        stored = self.pretrained.stored if self.pretrained is not None else {}
        places = {n: (i, p.numel()) for i, (n, p) in enumerate(self.model.named_parameters())}

        def owned(name: str) -> tuple[int, int]:
            index, numel = places[name]
            place = layout.slot_of.get(index)
            if place is None or not layout.buckets[place[0]].sharded:
                return 0, numel
            bucket = layout.buckets[place[0]]
            own, slot = bucket.slice(collectives.rank), bucket.slots[place[1]]
            start = min(max(own.start - slot.offset, 0), slot.numel)
            return start, max(min(own.stop - slot.offset, slot.numel), start)

        meta = [name for name, t in (*self.model.named_parameters(), *self.model.named_buffers()) if t.is_meta]
        if self.pretrained is not None:
            self._load_buffers(self.pretrained)
        rest = {name for name in meta if name not in stored}
        if rest:
            init = self.init if callable(self.init) else None
            self.initialisation = Initialisation(
                self.model, init, device=self.device, seed=seed, owned=owned, names=rest
            )

    def _load_buffers(self, pretrained: Pretrained) -> None:
        names = {id(tensor): name for name, tensor in pretrained.tensors.items() if tensor.is_meta}
        values: dict[str, torch.Tensor] = {}
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in names:
                    name = names[id(buffer)]
                    values.setdefault(name, self.whole(name, buffer))
                    module._buffers[key] = values[name]

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """All of a tensor on the meta device."""
        flat = torch.empty(like.numel(), dtype=like.dtype, device=self.device)
        self._fill(name, 0, flat)
        return flat.as_strided(like.shape, dense_stride(like))

    def _fill(self, name: str, start: int, out: torch.Tensor) -> None:
        if self.pretrained is not None and name in self.pretrained.stored:
            self.pretrained.fill(name, start, out)
        else:
            assert self.initialisation is not None
            self.initialisation.fill(name, start, out)

    def of_bucket(self, bucket: Bucket, values: Sequence[torch.Tensor], collectives: Broadcasting) -> torch.Tensor:
        """A bucket's values, flat in the master dtype: all of them, or of a sharded bucket on meta this rank's slice.

        Real parameters have rank 0's values on every rank.
        """
        if not any(values[slot.parameter].is_meta for slot in bucket.slots):
            flat = flatten(bucket, list(values))
            collectives.broadcast(flat, f"the first values of {bucket.describe()}")
            return flat
        own = bucket.slice(collectives.rank) if bucket.sharded else slice(0, bucket.numel)
        flat = torch.zeros(own.stop - own.start, dtype=bucket.master, device=self.device)
        for slot in bucket.slots:
            start, stop = max(slot.offset, own.start), min(slot.end, own.stop)
            value = values[slot.parameter]
            if not value.is_meta:
                whole = torch.empty(slot.numel, dtype=bucket.master, device=self.device)
                whole.as_strided(slot.shape, slot.stride).copy_(value)
                collectives.broadcast(whole, f"the first values of {slot.name}")
                if start < stop:
                    flat[start - own.start : stop - own.start] = whole[start - slot.offset : stop - slot.offset]
            elif start < stop:
                self._fill(slot.name, start - slot.offset, flat[start - own.start : stop - own.start])
        return flat
