"""What torch.distributed.checkpoint asks of a planner, for flat tensors that ranks hold arbitrary ranges of.

A saved tensor is one-dimensional: the elements of a parameter, or of its optimizer state, in the order in which they
lie in memory. Its chunks are what the saving ranks owned, and a loading rank asks for any other ranges.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class Part:
    """A range of a flat tensor, and where its values come from (a function: they are read when they are written)."""

    offset: int
    length: int
    values: torch.Tensor | Callable[[], torch.Tensor]

    def resolve(self) -> torch.Tensor:
        return self.values if isinstance(self.values, torch.Tensor) else self.values()


@dataclass(frozen=True)
class Flat:
    """A flat tensor of the checkpoint and the parts of it that this rank writes."""

    size: int
    dtype: torch.dtype
    parts: tuple[Part, ...]


def merge_facts(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's description of the step, with the optimizer state of parameters that lie on other ranks."""
    merged = facts[0]
    known = merged["optimizer"]["state"]
    for other in facts[1:]:
        for name, state in other["optimizer"]["state"].items():
            known.setdefault(name, state)
    return merged


class FlatSavePlanner(SavePlanner):
    """Writes what each rank says it owns. `facts` is everything else: it goes into the checkpoint's JSON."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.parts: dict[tuple[str, int], Part] = {}
        self.flats: Mapping[str, Flat] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.flats = state_dict
        self.parts = {(name, part.offset): part for name, flat in state_dict.items() for part in flat.parts}

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, (part.offset,)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size((part.offset,)), torch.Size((part.length,))),
                    properties=TensorProperties(dtype=flat.dtype),
                    size=torch.Size((flat.size,)),
                ),
            )
            for name, flat in self.flats.items()
            for part in flat.parts
        ]
        return SavePlan(items, planner_data=self.facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                entry = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
                entry.chunks.append(data.chunk)
        for name, entry in tensors.items():
            entry.chunks.sort(key=lambda chunk: chunk.offsets[0])
            end = 0
            for chunk in entry.chunks:
                assert chunk.offsets[0] == end, f"{name}: no rank, or two, have the elements from {end} on"
                end += chunk.sizes[0]
            assert end == entry.size[0], f"{name}: no rank has the elements from {end} on"
        facts = merge_facts([plan.planner_data for plan in all_plans])
        plans = [SavePlan(plan.items, storage_data=plan.storage_data) for plan in all_plans]
        return plans, Metadata(tensors, planner_data=facts)  # type: ignore[arg-type]  # dict is invariant

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        assert index.offset is not None
        return self.parts[index.fqn, index.offset[0]].resolve()


Targets = dict[str, list[tuple[int, torch.Tensor]]]  # per flat tensor: ranges that this rank wants, where they go


class FlatLoadPlanner(LoadPlanner):
    """Reads ranges of flat tensors into tensors that are there already, of any dtype."""

    def __init__(self) -> None:
        self.targets: Targets = {}
        self.metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.targets, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, ranges in self.targets.items():
            chunks = [
                ChunkStorageMetadata(torch.Size((offset,)), torch.Size((target.numel(),))) for offset, target in ranges
            ]
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint of weft holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        _, target = self.targets[read_item.dest_index.fqn][read_item.dest_index.index]
        return target.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
