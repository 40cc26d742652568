"""Which parameter lies where: flat buckets, in the order in which gradients become ready.

A bucket holds parameters of one dtype and one optimizer parameter group, one behind the other, and is cut into one
equal slice a rank. Every parameter and every slice starts at a multiple of 64 bytes in every dtype that the bucket's
elements are kept in. The layout is made once, from the first trace, and never changes; so is the order of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

ALIGNMENT = 64  # bytes; matrix products and vectorised updates round otherwise at other alignments


class Traced(Protocol):
    """What the layout reads of a trace."""

    graph: fx.Graph
    parameters: list[fx.Node]
    gradients: list[fx.Node | None]


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket; offsets and sizes count elements."""

    parameter: int  # index in model order
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a flat tensor of the whole bucket, in the parameter's own shape and strides."""
        return flat[self.offset : self.end].as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Bucket:
    """A run of parameters that travel together."""

    index: int
    slots: tuple[Slot, ...]
    numel: int  # padding included; a multiple of the world size
    world: int
    group: int | None  # the optimizer's parameter group; None: not trained
    compute: torch.dtype  # of the gathered parameters
    reduce: torch.dtype  # of the staged gradients
    master: torch.dtype  # of what the optimizer updates
    scatter: bool  # gradients are reduce-scattered and each rank updates its slice; else all-reduced, updated by all
    reduce_often: bool  # gradients are reduced in every micro-step; else once a step, from an accumulated whole
    sharded: bool  # parameters are released between uses and gathered again (ZeRO-3); else they stay gathered
    dormant: bool = False  # the loss that made the layout reaches none of its parameters

    @property
    def trained(self) -> bool:
        return self.group is not None

    @property
    def slice_numel(self) -> int:
        return self.numel // self.world

    def slice(self, rank: int) -> slice:
        return slice(rank * self.slice_numel, (rank + 1) * self.slice_numel)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding: ranges of elements that belong to no parameter."""
        ends = [0, *(slot.end for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def bytes(self, dtype: torch.dtype) -> int:
        return self.numel * dtype.itemsize

    def kept_bytes(self, state_elements: float) -> int:
        """What a rank keeps of the bucket between steps, with so many elements of optimizer state per parameter's."""
        owned = self.slice_numel if self.scatter else self.numel
        masters = owned * self.master.itemsize
        whole = 0 if self.sharded else self.bytes(self.compute)
        if whole and self.compute == self.master:
            masters = 0  # a view of the whole
        state = int(owned * self.master.itemsize * state_elements) if self.trained else 0
        return masters + whole + state

    def describe(self) -> str:
        """For messages: which bucket this is, in terms that a user knows."""
        names = [slot.name for slot in self.slots]
        what = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}, {len(names)} parameters"
        return f"bucket {self.index} ({what})"


@dataclass(frozen=True)
class Traits:
    """The choices that every bucket has; a mode makes the same ones for all."""

    scatter: bool
    reduce_often: bool
    sharded: bool


def traits_of(mode: str, dormant: bool) -> Traits:
    # A dormant bucket could not be gathered by the one rank whose batch comes to use it: it stays whole.
    return Traits(
        scatter=mode != "replicate",
        reduce_often=mode in ("zero2", "zero3") and not dormant,
        sharded=mode == "zero3" and not dormant,
    )


@dataclass(frozen=True)
class ParameterInfo:
    """What the layout asks of a parameter."""

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    group: int | None
    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype


@dataclass(frozen=True)
class Layout:
    """All buckets, and the order in which their collectives are issued in every micro-step."""

    mode: str
    world: int
    buckets: tuple[Bucket, ...]
    reduce_order: tuple[int, ...]
    gather_order: tuple[tuple[int, str], ...]  # (bucket, "forward" or "backward"), for sharded buckets
    slot_of: dict[int, tuple[int, int]]  # parameter -> bucket, slot
    # Buckets that stay gathered, in the order in which they are gathered after their updates; the others of that kind
    # (dormant ones) are gathered last.
    next_order: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()  # buckets whose optimizer state is in the next tier between updates
    offload_window: int = 2  # how many of those are in memory at a time

    def with_gather_order(self, order: tuple[tuple[int, str], ...]) -> Layout:
        return replace(self, gather_order=order)

    def with_next_order(self, order: Sequence[int]) -> Layout:
        return replace(self, next_order=tuple(order))

    def with_traits(self, traits: Mapping[int, Traits]) -> Layout:
        """This layout with other choices for some buckets; the orders of gathers are to be made anew."""
        buckets = tuple(
            replace(bucket, **vars(traits[bucket.index])) if bucket.index in traits else bucket
            for bucket in self.buckets
        )
        return replace(self, buckets=buckets, gather_order=(), next_order=())

    def with_offload(self, buckets: Sequence[int], window: int) -> Layout:
        return replace(self, offloaded=tuple(sorted(buckets)), offload_window=window)

    def fragment_bytes(self, bucket: int, state_elements: float) -> int:
        """Of a bucket's optimizer state, as this rank owns it."""
        entry = self.buckets[bucket]
        owned = entry.slice_numel if entry.scatter else entry.numel
        return int(owned * entry.master.itemsize * state_elements)

    def kept_bytes(self, state_elements: float) -> int:
        """What a rank keeps in memory between steps: of an offloaded state, the blocks that it passes through."""
        kept = sum(b.kept_bytes(0 if b.index in self.offloaded else state_elements) for b in self.buckets)
        largest = max((self.fragment_bytes(bucket, state_elements) for bucket in self.offloaded), default=0)
        return kept + min(self.offload_window, len(self.offloaded)) * largest

    def decisions(self) -> dict[str, Any]:
        """What rank 0 tells the others: who is with whom, and in which order."""
        return {
            "mode": self.mode,
            "buckets": [
                {
                    "parameters": [slot.parameter for slot in bucket.slots],
                    "dormant": bucket.dormant,
                    "scatter": bucket.scatter,
                    "reduce_often": bucket.reduce_often,
                    "sharded": bucket.sharded,
                }
                for bucket in self.buckets
            ],
            "reduce_order": list(self.reduce_order),
            "gather_order": [list(item) for item in self.gather_order],
            "next_order": list(self.next_order),
            "offloaded": list(self.offloaded),
            "offload_window": self.offload_window,
        }

    @classmethod
    def from_decisions(cls, parameters: Sequence[ParameterInfo], decisions: Mapping[str, Any], world: int) -> Layout:
        """The layout that another rank, or an earlier run, decided on."""
        entries = decisions["buckets"]
        packed = [([parameters[i] for i in entry["parameters"]], entry["dormant"]) for entry in entries]
        layout = _assemble(packed, decisions["mode"], world)
        traits = {
            index: Traits(entry["scatter"], entry["reduce_often"], entry["sharded"])
            for index, entry in enumerate(entries)
        }
        return replace(
            layout.with_traits(traits),
            reduce_order=tuple(decisions["reduce_order"]),
            gather_order=tuple((bucket, phase) for bucket, phase in decisions["gather_order"]),
            next_order=tuple(decisions["next_order"]),
            offloaded=tuple(decisions["offloaded"]),
            offload_window=decisions["offload_window"],
        )


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def make_layout(
    parameters: Sequence[ParameterInfo], trace: Traced, *, mode: str, world: int, bucket_bytes: int
) -> Layout:
    """Pack parameters into buckets of about `bucket_bytes`, in the order of their gradients in the trace.

    Trained buckets come first; then the dormant ones, which this trace does not reach; then, where parameters are
    sharded, the frozen ones in order of use. (Frozen parameters of the other modes stay where the user put them.)
    """
    position = {node: index for index, node in enumerate(trace.graph.nodes)}
    ready = [None if gradient is None else position[gradient] for gradient in trace.gradients]
    first_use = [min((position[user] for user in node.users), default=None) for node in trace.parameters]

    def in_order(members: list[ParameterInfo], key: Sequence[int | None]) -> list[ParameterInfo]:
        return sorted(members, key=lambda p: (key[p.index] or 0, p.index))

    trained = [p for p in parameters if p.group is not None]
    reached = in_order([p for p in trained if ready[p.index] is not None], ready)
    dormant = [p for p in trained if ready[p.index] is None]
    frozen = in_order([p for p in parameters if p.group is None and first_use[p.index] is not None], first_use)
    packed = [(members, False) for members in _pack(reached, bucket_bytes)]
    packed += [(members, True) for members in _pack(dormant, bucket_bytes)]
    if mode == "zero3":
        packed += [(members, False) for members in _pack(frozen, bucket_bytes)]
    layout = _assemble(packed, mode, world)

    def full_at(bucket: Bucket) -> tuple[bool, int]:
        return bucket.dormant, max((ready[slot.parameter] or 0 for slot in bucket.slots), default=0)

    order = sorted((bucket for bucket in layout.buckets if bucket.trained), key=full_at)
    return replace(layout, reduce_order=tuple(bucket.index for bucket in order))


def _assemble(packed: Sequence[tuple[Sequence[ParameterInfo], bool]], mode: str, world: int) -> Layout:
    buckets = tuple(
        _make_bucket(index, members, is_dormant, mode, world) for index, (members, is_dormant) in enumerate(packed)
    )
    slot_of = {
        slot.parameter: (bucket.index, position) for bucket in buckets for position, slot in enumerate(bucket.slots)
    }
    return Layout(mode, world, buckets, (), (), slot_of)


def _make_bucket(index: int, members: Sequence[ParameterInfo], is_dormant: bool, mode: str, world: int) -> Bucket:
    kind = members[0]
    align = ALIGNMENT // min(dtype.itemsize for dtype in (kind.compute, kind.reduce, kind.master))
    slots: list[Slot] = []
    end = 0
    for p in members:
        offset = round_up(end, align)
        slots.append(Slot(p.index, p.name, p.shape, p.stride, offset, p.numel))
        end = offset + p.numel
    return Bucket(
        index=index,
        slots=tuple(slots),
        numel=round_up(max(end, 1), align * world),
        world=world,
        group=kind.group,
        compute=kind.compute,
        reduce=kind.reduce,
        master=kind.master,
        dormant=is_dormant,
        **vars(traits_of(mode, is_dormant)),
    )


def _pack(parameters: Sequence[ParameterInfo], bucket_bytes: int) -> list[list[ParameterInfo]]:
    """Cut an ordered list into runs of one kind and at most `bucket_bytes`.

    A kind's run goes on past parameters of other kinds: a model that mixes dtypes or groups layer by layer would end up
    with a bucket a parameter otherwise.
    """
    runs: list[list[ParameterInfo]] = []
    open_runs: dict[object, list[ParameterInfo]] = {}
    sizes: dict[object, int] = {}
    for p in parameters:
        kind = (p.group, p.compute, p.reduce, p.master)
        size = p.numel * p.compute.itemsize
        if kind not in open_runs or sizes[kind] + size > bucket_bytes:
            open_runs[kind] = []
            sizes[kind] = 0
            runs.append(open_runs[kind])
        open_runs[kind].append(p)
        sizes[kind] += size
    return runs
