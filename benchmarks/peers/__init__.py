"""Contestants: what a user would pick to train on several machines, each at its best documented setting.

A peer is a function from the model to a `Contestant`. It is imported only in the processes that run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.workloads import Workload

BASELINE = "ddp"


class Contestant(Protocol):
    """One way to train, ready to run."""

    def step(self, batch: Any) -> torch.Tensor:
        """Forward, backward, reduction and update; returns this rank's loss."""
        ...

    def finish(self) -> None:
        """Return when nothing of the steps so far is in flight."""
        ...


Builder = Callable[[nn.Module, Workload], Contestant]


@dataclass(frozen=True)
class Peer:
    """An entry of the list of contestants.

    Attributes:
        title: for tables.
        build: "module:function" in this package, and the function's keyword arguments.
        sharded: what a rank holds whole between forward and backward decides what it must send (see `report`).
        sweep: settings to try before the rounds; the fastest is the one that is measured.
    """

    title: str
    build: str
    options: Mapping[str, Any]
    sharded: bool = False
    sweep: tuple[Mapping[str, Any], ...] = ()

    def builder(self, extra: Mapping[str, Any]) -> Builder:
        module, _, function = self.build.partition(":")
        found = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        return lambda model, workload: found(model, workload, **self.options, **extra)


PREFETCH = tuple({"prefetch_elements": count} for count in (200_000, 2_000_000, 20_000_000))

PEERS: dict[str, Peer] = {
    "ddp": Peer("DDP", "ddp:ddp", {}, sweep=({"bucket_cap_mb": 25}, {"bucket_cap_mb": 4}, {"bucket_cap_mb": 1})),
    "ddp-compile": Peer("DDP + torch.compile", "ddp:ddp", {"compiled": True}),
    "fsdp2": Peer("FSDP2", "fsdp2:fsdp2", {}, sharded=True),
    "fsdp2-compile": Peer("FSDP2, blocks compiled", "fsdp2:fsdp2", {"compiled": True}, sharded=True),
    "fsdp2-keep": Peer("FSDP2, kept for backward", "fsdp2:fsdp2", {"reshard": False}),
    "fsdp2-keep-compile": Peer(
        "FSDP2, kept for backward, blocks compiled", "fsdp2:fsdp2", {"reshard": False, "compiled": True}
    ),
    "deepspeed-1": Peer("DeepSpeed ZeRO-1", "deepspeed:deepspeed", {"stage": 1}),
    "deepspeed-2": Peer("DeepSpeed ZeRO-2", "deepspeed:deepspeed", {"stage": 2}),
    "deepspeed-3": Peer("DeepSpeed ZeRO-3", "deepspeed:deepspeed", {"stage": 3}, sharded=True, sweep=PREFETCH),
    "weft-auto": Peer("weft, auto", "weft:weft_step", {"mode": "auto"}),
    "weft-replicate": Peer("weft, replicate", "weft:weft_step", {"mode": "replicate"}),
    "weft-zero1": Peer("weft, zero1", "weft:weft_step", {"mode": "zero1"}),
    "weft-zero2": Peer("weft, zero2", "weft:weft_step", {"mode": "zero2"}),
    "weft-zero3": Peer("weft, zero3", "weft:weft_step", {"mode": "zero3"}, sharded=True),
}
# Not contestants: what a rank's compute takes when nobody communicates, and what one pass of all parameters over the
# network takes when nobody computes.
REFERENCES: dict[str, Peer] = {
    "compute": Peer("compute alone", "references:compute", {}),
    "wire": Peer("one pass of the parameters over the wire", "references:wire", {}),
}
QUICK = ("ddp", "fsdp2", "fsdp2-keep", "deepspeed-1", "deepspeed-3", "weft-auto", "weft-zero3")


class CannotRun(RuntimeError):
    """Why a peer cannot run a workload; stands in the table."""
