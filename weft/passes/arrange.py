"""Place a program's communication: gathers before their use, waits and updates behind reductions, the next gathers.

The compute nodes stand, and with them what hangs on their values: waits for gathers, releases, the starts of
reductions. The rest is placed by walking the program on the simulated machine, as the executor will on the real one:

- a gather starts early enough that compute will not wait for it, if its buffer fits then, in the layout's order;
- the wait for a reduction comes when it will be done, so that compute never stops for it, and the update right after;
- a gather for the next step goes where the wire would otherwise be idle; what is left of these comes at the end, in
  the order in which the next forward needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft import graph as g
from weft.graph import Policy
from weft.passes.aliases import aliases
from weft.passes.lifetimes import STAGING, received_numel, result_kind
from weft.predict.costs import Costs
from weft.simulate.machine import Message
from weft.simulate.schedule import Event, Schedule
from weft.simulate.timeline import Replay

LOOK = 1e-3  # seconds of compute between two looks at what is done

SLACK = 0.3  # of a reduction's time: measured times vary, and a wait that comes too early stops everything


@dataclass(frozen=True)
class Arrangement:
    """A program's events, placed.

    Attributes:
        events: in order.
        next_order: buckets in the order of their gathers for the next step.
        buffers: most bytes of buffers in use at a time.
        curve: bytes in use before each compute node.
    """

    events: list[Event]
    next_order: tuple[int, ...]
    buffers: int
    curve: np.ndarray


class Arranger:
    """What is known of a program before anything is placed."""

    def __init__(self, schedule: Schedule, costs: Costs, *, receives: bool) -> None:
        self.schedule, self.costs, self.receives = schedule, costs, receives
        self.step = schedule.step
        self.layout = self.step.layout
        self.gathers: list[Event] = []
        self.waits: dict[int, Event] = {}
        self.updates: dict[int, Event] = {}
        self.before_update: dict[int, list[Event]] = {}
        self.after_update: dict[int, Event] = {}
        self.next_gathers: dict[int, Event] = {}
        self.reach: Event | None = None
        self.fixed: list[Event] = []
        self.tail: list[Event] = []  # what stays behind all that: dormant buckets, the norm and what waits for it
        at_end = False
        for event in schedule.events:
            # Buffers are written once it is known that every rank has a loss.
            at_end = at_end or event.kind in ("norm", "update_whole", "write_buffers")
            unused = event.kind == "await_gather" and not event.node.users and not self._sharded(event)
            if at_end or (self._dormant(event) and (unused or event.kind not in ("await_gather", "release"))):
                self.tail.append(event)
            elif event.kind == "await_reduce":
                self.waits[event.bucket] = event
            elif event.kind == "update":
                self.updates[event.bucket] = event
            elif event.kind == "gather":
                if event.phase == "next":
                    self.next_gathers[event.bucket] = event
                else:
                    self.gathers.append(event)
            elif event.kind == "await_reach":
                self.reach = event
            elif unused or event.kind in ("reload", "await_reload"):
                self.before_update.setdefault(event.bucket, []).append(event)
            elif event.kind == "offload":
                self.after_update[event.bucket] = event
            else:
                self.fixed.append(event)
        self.earliest = self._earliest_updates() if self.updates else {}
        self.staging = self._staging()
        self.needs = self._needs()
        self.used = {(event.bucket, event.phase): event.at for event in self.fixed if event.kind == "await_gather"}
        # What buffers take whatever is done ahead, once it is known.
        self.least = np.zeros(len(schedule.compute) + 1, dtype=np.int64)

    def _dormant(self, event: Event) -> bool:
        return event.bucket >= 0 and self.layout.buckets[event.bucket].dormant

    def _sharded(self, event: Event) -> bool:
        return self.layout.buckets[event.bucket].sharded

    def _earliest_updates(self) -> dict[int, int]:
        """Per bucket that stays whole, the number of compute nodes up to the last that reads its parameters."""
        position = {node: index for index, node in enumerate(self.schedule.compute)}
        found: dict[int, int] = {}
        for node in self.step.graph.nodes:
            if node.target not in (g.parameters, g.await_gather) or self.layout.buckets[g.bucket_of(node)].sharded:
                continue
            readers = [user for value in node.users for alias in aliases(value) for user in (alias, *alias.users)]
            last = max((position.get(reader, -1) for reader in readers), default=-1)
            found[g.bucket_of(node)] = max(found.get(g.bucket_of(node), 0), last + 1)
        return found

    def _needs(self) -> list[int]:
        """Buckets that stay gathered, in the order in which this program's forward waits for them."""
        waits = [event.bucket for event in self.fixed if event.kind == "await_gather" and not self._sharded(event)]
        rest = [bucket for bucket in self.layout.next_order if bucket not in waits]
        return [bucket for bucket in (*waits, *rest) if bucket in self.next_gathers]

    def _staging(self) -> list[tuple[int, int]]:
        """(position, bucket) of the first gradient that is staged into each bucket's buffer within the step."""
        first: dict[int, int] = {}
        for index, node in enumerate(self.schedule.compute):
            if node.target in STAGING:
                bucket = self.layout.buckets[g.bucket_of(node)]
                kept = self.step.accumulate > 1 and not bucket.reduce_often
                if not bucket.dormant and not kept:
                    first.setdefault(bucket.index, index)
        return sorted((index, bucket) for bucket, index in first.items())

    def desired(self, ahead: float) -> list[int]:
        """Per gather, the position at which it starts so as to be done, and those behind it too, when they are used."""
        elapsed = self.schedule.elapsed
        begin = float("inf")
        places: list[int] = []
        for gather in reversed(self.gathers):
            message = self.costs.message(gather, self.layout)
            takes = 0.0 if message is None else ahead * (message[1] + message[2])
            begin = min(elapsed[self.used[gather.bucket, gather.phase]], begin) - takes
            places.append(max(bisect_right(elapsed, begin) - 1, 0))
        return places[::-1]

    def arrange(self, replay: Replay, policy: Policy, order: Sequence[int] | None) -> Arrangement:
        """Place everything under a policy. `order`: that of the gathers for the next step, if it is decided.

        `replay` is where the programs before this one left the machine; it is moved on.
        """
        return _Walk(self, replay, policy, order).run()


class _Walk:
    def __init__(self, arranger: Arranger, replay: Replay, policy: Policy, order: Sequence[int] | None) -> None:
        self.a, self.replay, self.policy = arranger, replay, policy
        self.order = None if order is None else [b for b in order if b in arranger.next_gathers]
        self.gathers = list(zip(arranger.gathers, arranger.desired(policy.ahead), strict=True))[::-1]
        self.ungathered = {(event.bucket, event.phase) for event in arranger.gathers}
        self.staging = arranger.staging[::-1]
        self.gathered: set[int] = set()  # buckets whose buffer is in use
        self.urgent = set(arranger.needs[: policy.urgent])
        self.issued: list[int] = []
        self.events: list[Event] = []
        self.flying: list[int] = []
        self.updatable: list[int] = []  # reduced; the parameters may still be read
        self.updated: set[int] = set()
        self.reach_known = arranger.reach is None
        self.at = 0
        self.alive = self.most = 0
        self.changes = [(0, 0)]
        self.accumulates = arranger.step.accumulate > 1

    # ---- events ----

    def put(self, event: Event) -> None:
        placed = Event(event.node, event.kind, event.bucket, self.at, event.phase)
        self.events.append(placed)
        self.replay.event(placed, accumulates=self.accumulates)
        self.use(self.buffer_change(event))

    def use(self, nbytes: int) -> None:
        self.alive += nbytes
        self.changes.append((self.at, self.alive))
        self.most = max(self.most, self.alive)

    def buffer_change(self, event: Event) -> int:
        """Bytes of buffers that an event begins or ends to use."""
        if event.bucket < 0:
            return 0
        bucket = self.a.layout.buckets[event.bucket]
        itemsize = bucket.reduce.itemsize
        if event.kind in ("gather", "release"):
            size = bucket.bytes(bucket.compute) if bucket.sharded else 0
            return size if event.kind == "gather" else -size
        if bucket.dormant:
            return 0
        received = received_numel(bucket) * itemsize if bucket.scatter and self.a.receives else 0
        staged = 0 if self.a.step.accumulate > 1 and not bucket.reduce_often else bucket.bytes(bucket.reduce)
        kept = {"received": received, "staged": staged, "slice": bucket.slice_numel * itemsize, "sum": 0}
        kind = result_kind(self.a.step, bucket, receives=self.a.receives)
        if event.kind == "reduce":
            return received
        if event.kind == "await_reduce":
            return kept[kind] - staged - received
        return -kept[kind] if event.kind == "update" else 0

    # ---- the walk ----

    def run(self) -> Arrangement:
        a = self.a
        elapsed = a.schedule.elapsed
        for event in a.fixed:
            self.compute_until(event.at)
            if event.kind == "await_gather" and self._sharded(event):
                while (event.bucket, event.phase) in self.ungathered:
                    self.gather_one()
            if event.kind == "reduce":
                while len(self.flying) >= self.policy.in_flight:
                    self.finish()
            self.put(event)
            if event.kind == "reduce":
                self.flying.append(event.bucket)
            elif event.kind == "release":
                self.gathered.discard(event.bucket)
                self.gather_ahead()
        self.compute_until(len(elapsed) - 1)
        while self.flying:
            self.finish()
        self.update_ready()
        self.gather_next(finally_=True)
        if not self.reach_known and a.reach is not None:
            self.put(a.reach)
        for event in a.tail:
            self.put(event)
        curve = np.zeros(len(elapsed), dtype=np.int64)
        ends = [at for at, _ in self.changes[1:]] + [len(elapsed) - 1]
        for (start, nbytes), end in zip(self.changes, ends, strict=True):
            curve[start : end + 1] = np.maximum(curve[start : end + 1], nbytes)
        return Arrangement(self.events, tuple(self.issued), self.most, curve)

    def compute_until(self, end: int) -> None:
        elapsed = self.a.schedule.elapsed
        self.gather_ahead()
        while self.at < end:
            stop = min(end, max(self.at + 1, bisect_right(elapsed, elapsed[self.at] + LOOK) - 1))
            if self.staging:
                stop = min(stop, max(self.staging[-1][0], self.at + 1))
            while self.staging and self.staging[-1][0] < stop:
                self.begin_staging(self.staging.pop()[1])
            self.replay.machine.compute(elapsed[stop] - elapsed[self.at])
            self.at = stop
            self.look()

    def look(self) -> None:
        """Between two compute nodes: take note of what is done, and start what is due."""
        now = self.replay.machine.now
        while self.flying:
            message = self.replay.reductions.get(self.flying[0])
            if message is not None and not _surely_done(message, now):
                break
            self.finish()
        self.update_ready()
        self.gather_ahead()
        self.gather_next(finally_=False)

    # ---- gathers of this step ----

    def gather_one(self) -> None:
        event, _ = self.gathers.pop()
        self.ungathered.discard((event.bucket, event.phase))
        self.gathered.add(event.bucket)
        self.put(event)

    def gather_ahead(self) -> None:
        while self.gathers:
            event, desired = self.gathers[-1]
            bucket = self.a.layout.buckets[event.bucket]
            if desired > self.at or event.bucket in self.gathered:
                return
            # It takes its room until it is used, and what is needed meanwhile takes its own.
            until = self.a.used[event.bucket, event.phase]
            ahead = max(self.alive - int(self.a.least[self.at]), 0) + bucket.bytes(bucket.compute)
            if ahead + int(self.a.least[self.at : until + 1].max()) > self.policy.room:
                return
            self.gather_one()

    def _sharded(self, event: Event) -> bool:
        return self.a.layout.buckets[event.bucket].sharded

    # ---- reductions ----

    def begin_staging(self, index: int) -> None:
        bucket = self.a.layout.buckets[index]
        size = bucket.bytes(bucket.reduce)
        received = received_numel(bucket) * bucket.reduce.itemsize if bucket.scatter and self.a.receives else 0
        while self.flying and self.alive + size + received > self.policy.room:
            self.finish()
        self.use(size)

    def finish(self) -> None:
        bucket = self.flying.pop(0)
        self.put(self.a.waits[bucket])
        if bucket in self.a.updates:
            self.updatable.append(bucket)
            self.update_ready()

    def update_ready(self) -> None:
        for bucket in list(self.updatable):
            if self.a.earliest.get(bucket, 0) > self.at:
                continue
            self.updatable.remove(bucket)
            if not self.reach_known:
                assert self.a.reach is not None
                self.put(self.a.reach)
                self.reach_known = True
            for event in self.a.before_update.get(bucket, ()):
                self.put(event)
            self.put(self.a.updates[bucket])
            if bucket in self.a.after_update:
                self.put(self.a.after_update[bucket])
            self.updated.add(bucket)

    # ---- gathers of the next step ----

    def gather_next(self, finally_: bool) -> None:
        # They stand behind all gathers of this step, on every rank, whatever the shapes of its batch.
        if self.gathers:
            return
        while len(self.issued) < len(self.a.next_gathers):
            bucket = self.next_bucket()
            if bucket is None:
                return
            waits = not finally_ and bucket not in self.urgent
            if waits and self.replay.machine.backlog() > self.policy.backlog:
                return
            self.put(self.a.next_gathers[bucket])
            self.issued.append(bucket)

    def next_bucket(self) -> int | None:
        if self.order is not None:
            bucket = self.order[len(self.issued)]
            return bucket if bucket in self.updated else None
        # Of those that are updated, what the next forward needs first.
        return next((b for b in self.a.needs if b in self.updated and b not in self.issued), None)


def _surely_done(message: Message, now: float) -> bool:
    return message.done >= 0 and now >= message.done + SLACK * (message.done - message.posted)
