"""Contestants: what a user would pick to train on several machines, each at its best documented setting.

A peer is a function from the model and the work of a step to a `Contestant`. It is imported only in the processes that
run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.workloads import Work, Workload

BASELINE = "ddp"


class Contestant(Protocol):
    """One way to train, ready to run."""

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        """Forward and backward of every micro-batch, reduction and update; returns this rank's mean loss."""
        ...

    def finish(self) -> None:
        """Return when nothing of the steps so far is in flight."""
        ...


class Planned(Contestant, Protocol):
    """A contestant that knows what it sends."""

    @property
    def passes_a_step(self) -> float:
        """Passes of all parameters over the wire (see `Peer`)."""
        ...


Builder = Callable[[nn.Module, Workload, Work], Contestant]


@dataclass(frozen=True)
class Peer:
    """An entry of the list of contestants.

    Attributes:
        title: for tables.
        build: "module:function" in this package, and the function's keyword arguments.
        often, once: passes of all parameters over the wire in every micro-step and in every step: a gather is one, a
            reduction to slices is one, an all-reduce is two. weft's plans say themselves what they send.
        sweep: settings to try before the rounds; the fastest is the one that is measured.
    """

    title: str
    build: str
    options: Mapping[str, Any]
    often: int = 0
    once: int = 2
    sweep: tuple[Mapping[str, Any], ...] = ()

    def passes(self, accumulate: int) -> int:
        """Passes of all parameters over the wire in a step."""
        return self.often * accumulate + self.once

    def builder(self, extra: Mapping[str, Any]) -> Builder:
        module, _, function = self.build.partition(":")
        found = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        return lambda model, workload, work: found(model, workload, work, **self.options, **extra)


PREFETCH = tuple({"prefetch_elements": count} for count in (200_000, 2_000_000, 20_000_000))

# Of the memory between what zero3 needs and what keeping all parameters whole needs.
ABLATED: dict[str, Any] = {"mode": "zero3", "room": 0.5}

PEERS: dict[str, Peer] = {
    "ddp": Peer("DDP", "ddp:ddp", {}, sweep=({"bucket_cap_mb": 25}, {"bucket_cap_mb": 4}, {"bucket_cap_mb": 1})),
    "ddp-compile": Peer("DDP + torch.compile", "ddp:ddp", {"compiled": True}),
    "fsdp2": Peer("FSDP2", "fsdp2:fsdp2", {}, often=3, once=0),
    "fsdp2-once": Peer("FSDP2, gradients reduced once a step", "fsdp2:fsdp2", {"reduce_once": True}, often=2, once=1),
    "fsdp2-compile": Peer("FSDP2, blocks compiled", "fsdp2:fsdp2", {"compiled": True}, often=3, once=0),
    "fsdp2-keep": Peer("FSDP2, kept for backward", "fsdp2:fsdp2", {"reshard": False}, often=2, once=0),
    "fsdp2-keep-compile": Peer(
        "FSDP2, kept for backward, blocks compiled",
        "fsdp2:fsdp2",
        {"reshard": False, "compiled": True},
        often=2,
        once=0,
    ),
    "deepspeed-1": Peer("DeepSpeed ZeRO-1", "deepspeed:deepspeed", {"stage": 1}),
    "deepspeed-2": Peer("DeepSpeed ZeRO-2", "deepspeed:deepspeed", {"stage": 2}, often=1, once=1),
    "deepspeed-3": Peer("DeepSpeed ZeRO-3", "deepspeed:deepspeed", {"stage": 3}, often=3, once=0, sweep=PREFETCH),
    "weft-auto": Peer("weft, auto", "weft:weft_step", {"mode": "auto"}),
    "weft-replicate": Peer("weft, replicate", "weft:weft_step", {"mode": "replicate"}),
    "weft-zero1": Peer("weft, zero1", "weft:weft_step", {"mode": "zero1"}),
    "weft-zero2": Peer("weft, zero2", "weft:weft_step", {"mode": "zero2"}, often=1, once=1),
    "weft-zero3": Peer("weft, zero3", "weft:weft_step", {"mode": "zero3"}, often=3, once=0),
    "weft-base": Peer(
        "weft, base schedule",
        "weft:weft_step",
        {**ABLATED, "passes": {"prefetch": False, "unshard": False}},
        often=3,
        once=0,
    ),
    "weft-prefetch": Peer(
        "weft, prefetch alone", "weft:weft_step", {**ABLATED, "passes": {"unshard": False}}, often=3, once=0
    ),
    "weft-unshard": Peer(
        "weft, unshard alone", "weft:weft_step", {**ABLATED, "passes": {"prefetch": False}}, often=3, once=0
    ),
    "weft-both": Peer("weft, prefetch and unshard", "weft:weft_step", ABLATED, often=3, once=0),
    "weft-published": Peer(
        "weft, the published rule of prefetch",
        "weft:weft_step",
        {**ABLATED, "passes": {"prefetch": {"rule": "earliest"}}},
        often=3,
        once=0,
    ),
}
# Not contestants: what a rank's compute takes when nobody communicates, and what one pass of all parameters over the
# network takes when nobody computes.
REFERENCES: dict[str, Peer] = {
    "compute": Peer("compute alone", "references:compute", {}),
    "wire": Peer("one pass of the parameters over the wire", "references:wire", {}),
}
ABLATIONS = ("weft-base", "weft-prefetch", "weft-unshard", "weft-both", "weft-published")
QUICK = ("ddp", "fsdp2", "fsdp2-once", "fsdp2-keep", "deepspeed-1", "deepspeed-3", "weft-auto", "weft-zero3")


def standard(full: bool, work: Work) -> tuple[str, ...]:
    """Who competes unless somebody is named."""
    peers = tuple(peer for peer in PEERS if peer not in ABLATIONS) if full else QUICK
    return peers if work.accumulate > 1 else tuple(peer for peer in peers if peer != "fsdp2-once")


class CannotRun(RuntimeError):
    """Why a peer cannot run a workload; stands in the table."""
