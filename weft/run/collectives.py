"""The collectives that a program uses, behind one small interface for gloo, NCCL and a single process.

Gathers, reductions and control messages travel in groups of their own: within a group the order of calls must be the
same on every rank, between groups it need not. Every wait turns a failure into a `PeerError` that names who waited, for
what.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft._torch import all_gather, default_store, reduce_scatter
from weft.errors import PeerError, SequenceError
from weft.run.threads import calm_gloo

# Set when a wait on another rank has failed: what still waits for others, in other threads, does so in vain.
peers_lost = threading.Event()


class Pending(Protocol):
    def wait(self) -> Any: ...


class Done:
    """A collective of one rank: nothing to wait for."""

    def wait(self) -> None:
        return None


class Local:
    """One process: a gather is a copy, a reduction nothing."""

    rank, world, name = 0, 1, "one process"
    ranks: Sequence[int] = (0,)
    receives = False  # whether a reduce-scatter needs a second buffer, for the other ranks' parts of this one's slice

    def gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int = 0) -> Pending:
        """Start bringing all ranks' shards together. Messages of gathers in flight together are told apart by tag."""
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Done()

    def reduce_scatter(self, received: torch.Tensor | None, staged: torch.Tensor, tag: int = 0) -> Pending:
        """Start bringing the parts of this rank's slice together."""
        return Done()

    def scattered(self, received: torch.Tensor | None, staged: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the sum, after the wait."""
        return staged

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return Done()

    def start_rows(self, row: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """A small tensor of every rank, as rows in rank order."""
        return row[None], Done()

    def start_reach(self, flags: torch.Tensor) -> Pending:
        """The elementwise maximum of a small CPU tensor over ranks, in place."""
        return Done()

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's values on every rank."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def saving_group(self) -> dist.ProcessGroup | None:
        """A gloo group for checkpoints, which may be written by a thread while training goes on; None: one process."""
        return None

    def wait(self, pending: Pending, what: str) -> None:
        pending.wait()

    def named(self, action: Callable[[], Any], what: str) -> None:
        """Run something that waits for other ranks: if it fails, the error says who waited, for what."""
        action()

    def check_runs(self) -> None:
        """Raise where steps can be planned but not run."""


class Planning(Local):
    """A process group of backend "fake": one process plans as any rank of any world, and nothing can run."""

    name = "fake"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.receives = device.type == "cpu"  # as the gloo or nccl that would be there

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world

    def check_runs(self) -> None:
        raise RuntimeError(
            f'the process group\'s backend is "fake": there are no {self.world} ranks, so a step can be planned with '
            "step.prepare(batch) but not run. To run it start real processes, for instance with torchrun"
        )


class Distributed(Local):
    """Several ranks; `Gloo` and `Nccl` differ in gathers, reduce-scatters and in what a wait means."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world = len(self.ranks)
        self.timeout = timeout
        self.name = dist.get_backend(group)
        self.gathers, self.reductions, self.control = _own_groups(group, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._started(dist.all_reduce(tensor, group=self.reductions, async_op=True))

    def start_rows(self, row: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        rows = row.new_empty(self.world, *row.shape)
        return rows, all_gather(rows.view(-1), row, self.reductions)

    def start_reach(self, flags: torch.Tensor) -> Pending:
        return self._started(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control, async_op=True))

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        pending = dist.broadcast(tensor, src=self.ranks[0], group=self.gathers, async_op=True)
        self.wait(self._started(pending), what)

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        self.named(lambda: dist.all_gather_object(found, value, group=self.control), "what every rank holds")
        return found

    def saving_group(self) -> dist.ProcessGroup:
        for known, timeout, made in _saving_groups:
            if known is self.control and timeout == self.timeout:
                return made
        everyone = len(self.ranks) == dist.get_world_size()
        made = dist.new_group(
            list(self.ranks), timeout=self.timeout, backend="gloo", use_local_synchronization=not everyone
        )
        _saving_groups.append((self.control, self.timeout, made))
        return made

    def wait(self, pending: Pending, what: str) -> None:
        self.named(pending.wait, what)

    def named(self, action: Callable[[], Any], what: str) -> None:
        try:
            action()
        except RuntimeError as error:
            peers_lost.set()
            others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
            raise PeerError(
                f"rank {self.ranks[self.rank]} waited for rank{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))} in {what} and did not get it (timeout "
                f"{self.timeout.total_seconds():g} s): {str(error).splitlines()[0]}"
            ) from error

    @staticmethod
    def _started(pending: dist.Work | None) -> dist.Work:
        assert pending is not None
        return pending


_groups: list[tuple[dist.ProcessGroup, timedelta, tuple[dist.ProcessGroup, ...]]] = []
_saving_groups: list[tuple[dist.ProcessGroup, timedelta, dist.ProcessGroup]] = []


def _own_groups(group: dist.ProcessGroup, timeout: timedelta) -> tuple[dist.ProcessGroup, ...]:
    """Groups for gathers, reductions and control messages over the ranks of a group; made once for all steps."""
    for known, known_timeout, made in _groups:
        if known is group and known_timeout == timeout:
            return made
    ranks = dist.get_process_group_ranks(group)
    everyone = len(ranks) == dist.get_world_size()
    made = tuple(
        # Control messages are CPU tensors that the program branches on; a GPU's stream must not be waited for.
        dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not everyone)
        for backend in (None, None, "gloo")
    )
    _groups.append((group, timeout, made))
    calm_gloo()
    return made


def leave() -> None:
    """End weft's own groups at exit: their threads may not outlive the interpreter whose tensors they hold."""
    while _groups:
        for group in _groups.pop()[2]:
            with suppress(Exception):  # the user may have ended everything already
                dist.destroy_process_group(group)


class All:
    """Several messages as one."""

    def __init__(self, parts: list[dist.Work]) -> None:
        self.parts = parts

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class Gloo(Distributed):
    """Gathers and reduce-scatters as direct messages between the ranks.

    gloo's own reduce-scatter moves twice the bytes it should, and its all-gather goes through a buffer of its own. With
    messages the reduction is an all-to-all and a sum in rank order: the same bits for every layout.
    """

    receives = True

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Any, tag: int
    ) -> All:
        """Send `outgoing[r]` to rank r and receive `incoming[r]` from it; nearest ranks first, in a ring."""
        works: list[dist.Work | None] = []
        for distance in range(1, self.world):
            source = (self.rank - distance) % self.world
            works.append(dist.irecv(incoming[source], group=group, group_src=source, tag=tag))
        for distance in range(1, self.world):
            target = (self.rank + distance) % self.world
            works.append(dist.isend(outgoing[target], group=group, group_dst=target, tag=tag))
        return All([self._started(work) for work in works])

    def gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int = 0) -> Pending:
        parts = full.chunk(self.world)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        return self._exchange([shard] * self.world, parts, self.gathers, tag)

    def reduce_scatter(self, received: torch.Tensor | None, staged: torch.Tensor, tag: int = 0) -> Pending:
        assert received is not None
        incoming = list(received.chunk(self.world - 1))
        incoming.insert(self.rank, staged)  # never used: nobody sends to itself
        return self._exchange(staged.chunk(self.world), incoming, self.reductions, tag)

    def scattered(self, received: torch.Tensor | None, staged: torch.Tensor) -> torch.Tensor:
        assert received is not None
        parts = list(received.chunk(self.world - 1))
        total = parts[0]
        own = staged.chunk(self.world)[self.rank]
        if self.rank == 0:
            torch.add(own, total, out=total)
        parts.insert(self.rank, own)
        for part in parts[2 if self.rank == 0 else 1 :]:
            total.add_(part)
        return total


class Nccl(Distributed):
    """NCCL's waits order streams and return at once; its own watchdog keeps the timeout."""

    def gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int = 0) -> Pending:
        return all_gather(full, shard, self.gathers)

    def reduce_scatter(self, received: torch.Tensor | None, staged: torch.Tensor, tag: int = 0) -> Pending:
        size = staged.numel() // self.world
        return reduce_scatter(staged[self.rank * size : (self.rank + 1) * size], staged, self.reductions)

    def scattered(self, received: torch.Tensor | None, staged: torch.Tensor) -> torch.Tensor:
        size = staged.numel() // self.world
        return staged[self.rank * size : (self.rank + 1) * size]


class Numbered(Distributed):
    """Numbers every collective and compares what the ranks start under each number, before they start it.

    The first rank to come leaves a note in the job's store; the others read it. Nobody waits, so that ranks may be
    ahead of each other, but each collective costs round trips to the store.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(group, timeout)
        name = f"weft/{'-'.join(map(str, self.ranks))}/{next(_numbered)}"
        self.store = dist.PrefixStore(name, default_store())
        self.counts = dict.fromkeys(("gather", "reduction", "control message"), 0)

    def _check(self, channel: str, what: str) -> None:
        self.counts[channel] += 1
        number, me = self.counts[channel], self.ranks[self.rank]
        key = f"{channel}/{number}"
        first = self.store.compare_set(key, "", f"{me}:{what}").decode()
        other, _, theirs = first.partition(":")
        if theirs != what:
            message = (
                f"{channel} {number} is {theirs} on rank {other} and {what} on rank {me}: they do not run the same "
                "sequence. All ranks must call step, evaluate, gathered and state_dict in the same order"
            )
            self.store.set("out of sequence", message)
            raise SequenceError(message)
        if self.store.add(f"{key}/passed", 1) == self.world:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/passed")

    def named(self, action: Callable[[], Any], what: str) -> None:
        try:
            super().named(action, what)
        except PeerError as error:
            with suppress(RuntimeError):  # the rank that keeps the store may be the one that is gone
                if self.store.check(["out of sequence"]):
                    raise SequenceError(self.store.get("out of sequence").decode()) from error
            raise

    def gather(self, full: torch.Tensor, shard: torch.Tensor, tag: int = 0) -> Pending:
        self._check("gather", f"that of bucket {tag} ({full.numel()} elements)")
        return super().gather(full, shard, tag)

    def reduce_scatter(self, received: torch.Tensor | None, staged: torch.Tensor, tag: int = 0) -> Pending:
        self._check("reduction", f"that of bucket {tag} ({staged.numel()} elements)")
        return super().reduce_scatter(received, staged, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        self._check("reduction", f"a sum of {tensor.numel()} elements")
        return super().all_reduce(tensor)

    def start_rows(self, row: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        self._check("reduction", f"the rows of {row.numel()} elements")
        return super().start_rows(row)

    def start_reach(self, flags: torch.Tensor) -> Pending:
        self._check("control message", "which parameters are reached")
        return super().start_reach(flags)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        self._check("gather", f"the broadcast of {what}")
        super().broadcast(tensor, what)

    def gather_objects(self, value: Any) -> list[Any]:
        self._check("control message", "an exchange of objects")
        return super().gather_objects(value)


_numbered = itertools.count()


class NumberedGloo(Numbered, Gloo):
    pass


class NumberedNccl(Numbered, Nccl):
    pass


def connect(device: torch.device, mesh: Any, timeout: timedelta, *, debug: bool = False) -> Local:
    """The collectives for where this process runs: alone, under torchrun, or in an existing process group."""
    if mesh is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join("nccl" if device.type == "cuda" else "gloo", timeout)
    if mesh is None and not dist.is_initialized():
        return Local()
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    assert group is not None
    if dist.get_world_size(group) == 1:
        return Local()
    backend = dist.get_backend(group)
    if backend == "fake":
        return Planning(group, device)
    kinds: dict[str, type[Distributed]] = {"nccl": Nccl, "gloo": Gloo}
    if debug:
        kinds = {"nccl": NumberedNccl, "gloo": NumberedGloo}
    name = next((kind for kind in kinds if kind in _backend_for(backend, device)), None)
    if name is None or (name == "gloo" and device.type != "cpu") or (name == "nccl" and device.type != "cuda"):
        raise ValueError(
            f"the model is on {device} and the process group's backend is {backend!r}; weft uses nccl for CUDA and "
            "gloo for the CPU. Call init_process_group with that backend, or move the model before weft.compile"
        )
    return kinds[name](group, timeout)


def _join(backend: str, timeout: timedelta) -> None:
    """Make the process group of a start by torchrun or the like, from the environment."""
    environment = os.environ
    one_host = environment["WORLD_SIZE"] == environment.get("LOCAL_WORLD_SIZE")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not one_host:
        dist.init_process_group(backend, timeout=timeout)
        return
    # torchrun's store outlives a restart (--max-restarts), and with it the addresses of the processes that are gone:
    # gloo would connect to those. On several hosts the count is not the same everywhere (see docs/checkpoints.md).
    shared = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout=timeout)
    store = dist.PrefixStore(f"weft/start-{environment['TORCHELASTIC_RESTART_COUNT']}", shared)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _backend_for(backend: str, device: torch.device) -> str:
    """A group made with `cpu:gloo,cuda:nccl` has a backend a device type."""
    for part in backend.split(","):
        kind, _, name = part.partition(":")
        if kind == device.type:
            return name
    return backend
