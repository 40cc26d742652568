"""Measures what messages between the ranks take, through the very calls that a step uses.

All ranks must start the same sequence of messages, whatever their clocks say: every count follows from numbers that
all have exchanged. Times are taken over repetitions, then the median over ranks: every rank holds the same result.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from weft.measure.clock import Clock, Moment
from weft.measure.load import Load
from weft.predict.links import KINDS, Curve, Kind, Links, LinkTimes, default_links, sizes_up_to
from weft.run.collectives import Distributed, Local, Pending

DEPTH = 4  # messages in flight in a channel that is kept busy
MEMORY = 32 << 20  # bytes of buffers in flight: fewer large ones
CHANGED = 0.25  # a probe this far off means another network
PROBE_BYTES, PROBE_SECONDS = 1 << 20, 0.02
LARGE = 4 << 20  # bytes: no larger message where many are sent
# Limiters and switches let a burst through before they hold to their rate: what passes before a clock runs.
SETTLING, SETTLING_BYTES = 0.01, 1 << 20
SMALL = 1 << 16  # bytes: a message whose time is latency
MESSAGE_SECONDS = 0.012  # of one message where many are sent, so that a slow link does not take long
LOAD_SECONDS, CONTENTION_ROUNDS = 0.04, 5  # of compute in a round of contention; how many
MOST_QUEUED = 500  # messages at once
ALIGNMENT = 16  # elements: where a rank's slice of a bucket may end


@dataclass(frozen=True)
class Buffers:
    """What a bucket's messages travel in, as the executor makes them."""

    full: torch.Tensor
    shard: torch.Tensor
    staged: torch.Tensor
    received: torch.Tensor | None


class Channel:
    """Sends messages of the kinds that a step sends, and takes their times."""

    def __init__(self, collectives: Local, device: torch.device) -> None:
        self.collectives, self.device, self.clock = collectives, device, Clock(device)

    def rounded(self, nbytes: int) -> int:
        """The size of a bucket of about so many bytes that divides among the ranks."""
        piece = 4 * ALIGNMENT * self.collectives.world
        return max(1, round(nbytes / piece)) * piece

    def buffers(self, nbytes: int) -> list[Buffers]:
        """As many as may be in flight together."""
        world = self.collectives.world
        size = self.rounded(nbytes) // 4 // world

        def zeros(numel: int) -> torch.Tensor:  # written to, so that no page is made while the clock runs
            return torch.empty(numel, device=self.device).zero_()

        return [
            Buffers(
                zeros(size * world),
                zeros(size),
                zeros(size * world),
                zeros(size * (world - 1)) if self.collectives.receives else None,
            )
            for _ in range(max(2, min(DEPTH, MEMORY // (3 * nbytes))))
        ]

    def start(self, kind: Kind, buffers: Buffers, tag: int) -> Pending:
        if kind == "gather":
            return self.collectives.gather(buffers.full, buffers.shard, tag)
        if kind == "reduce_scatter":
            return self.collectives.reduce_scatter(buffers.received, buffers.staged, tag)
        return self.collectives.all_reduce(buffers.staged)

    def finish(self, kind: Kind, pending: Pending) -> Moment:
        self.collectives.wait(pending, f"the measurement of {kind} messages")
        return self.clock.now()

    def alone(self, kind: Kind, buffers: Buffers, count: int, settling: int = 1) -> list[float]:
        """Seconds of messages one at a time, after some that settle the link and bring the ranks together."""
        found = []
        for _ in range(settling + count):
            started = self.clock.now()
            found.append(self.clock.between(started, self.finish(kind, self.start(kind, buffers, 0))))
        return found[settling:]

    def queue(self, kinds: Sequence[Kind], buffers: Sequence[Buffers], count: int, settling: int) -> float:
        """Seconds of so many messages of each kind, after some that settle the link and bring the ranks together.

        The kinds take turns, and as many of each are in flight as there are buffers.
        """
        self._queue(kinds, buffers, settling)
        return self._queue(kinds, buffers, count)

    def _queue(self, kinds: Sequence[Kind], buffers: Sequence[Buffers], count: int) -> float:
        flight: dict[Kind, deque[Pending]] = {kind: deque() for kind in kinds}
        ended = started = self.clock.now()
        for index in range(count):
            slot = index % len(buffers)
            for kind in kinds:
                if len(flight[kind]) == len(buffers):
                    ended = self.finish(kind, flight[kind].popleft())
                flight[kind].append(self.start(kind, buffers[slot], slot))
        for _ in range(min(count, len(buffers))):
            for kind in kinds:
                ended = self.finish(kind, flight[kind].popleft())
        return self.clock.between(started, ended)


def measure_links(
    collectives: Local,
    *,
    device: torch.device,
    largest: int,
    store_get: Callable[[], Links | None] | None = None,
    progress: Callable[[str], None] | None = None,
    seconds: float = 1.8,
) -> Links:
    """The links between the ranks of `collectives`; every rank calls this and gets the same answer.

    One process and a "fake" process group get `default_links`.

    Args:
        largest: bytes of the largest bucket that will be sent. Sizes that would take long on a slow link are left out:
            the curves go on straight beyond their last point.
        store_get: what was measured earlier, if anything was; rank 0's answer counts, and it is taken if a quick probe
            finds the network unchanged.
        progress: told what is measured.
        seconds: about how long this may take.
    """
    if largest < 1 or not seconds > 0:
        raise ValueError(f"largest={largest} and seconds={seconds}: both must be above 0")
    if not isinstance(collectives, Distributed):
        return default_links(collectives.world)
    known = collectives.gather_objects(_stored(store_get))[0]
    if known is not None:
        links = Links.from_json(known)
        if links.world == collectives.world and not links_changed(collectives, links, largest, device=device):
            return links
    return _Measurement(Channel(collectives, device), largest, seconds, progress or (lambda text: None)).run()


def _stored(store_get: Callable[[], Links | None] | None) -> object:
    found = store_get() if store_get is not None else None
    return None if found is None else found.to_json()


class _Measurement:
    def __init__(self, channel: Channel, largest: int, seconds: float, progress: Callable[[str], None]) -> None:
        self.channel, self.collectives = channel, channel.collectives
        self.sizes = sorted({channel.rounded(size) for size in sizes_up_to(largest)})
        self.seconds, self.progress = seconds, progress
        self.service: dict[Kind, dict[int, float]] = {kind: {} for kind in KINDS}
        self.single: dict[Kind, dict[int, float]] = {kind: {} for kind in KINDS}
        self.communicating, self.carried = 0.0, 0.0  # CPU seconds of the threads that communicate, and bytes

    def run(self) -> Links:
        self._warm_up()
        for size in self.sizes:
            self._measure_size(size)
        size, message = self._contention_size()
        small = self._agreed(self._control_seconds())
        shared = self._shared(size, message)
        compute, collective = self._contention(size, message)
        curves = {
            kind: LinkTimes(Curve.fit(self.service[kind].items()), Curve.fit(self.single[kind].items()))
            for kind in KINDS
        }
        cpu = 0.0
        if self.channel.device.type == "cpu" and self.carried:
            cpu = self._agreed(self.communicating / self.carried)
        return Links(
            world=self.collectives.world,
            **curves,
            shared=shared,
            compute_slowdown=compute,
            collective_slowdown=collective,
            cpu_seconds_per_byte=cpu,
            small=small,
        )

    def _agreed(self, value: float) -> float:
        """The median of what the ranks found."""
        return float(median(self.collectives.gather_objects(value)))

    def _warm_up(self) -> None:
        """Connections open, and their windows grow."""
        buffers = self.channel.buffers(min(self.sizes[-1], 1 << 18))
        for kind in KINDS:
            self.channel.queue([kind], buffers, len(buffers), len(buffers))

    def _measure_size(self, size: int) -> None:
        kinds = [kind for kind in KINDS if not self._too_slow(kind, size)]
        if not kinds:
            return
        self.progress(f"messages of {size / 2**10:.0f} KiB")
        buffers = self.channel.buffers(size)
        for kind in kinds:
            trials = self.channel.alone(kind, buffers[0], 2, max(1, min(4, SETTLING_BYTES // size)))
            trial = max(1e-6, self._agreed(min(trials)))
            budget = self.seconds / (16 if size <= SMALL else 8) / len(KINDS)
            singles = max(1, min(8, int(budget / 3 / trial)))
            single = median(trials + self.channel.alone(kind, buffers[0], singles))
            # A queue and one message: the difference is free of what passes before the first arrives.
            count, settling = max(2, min(16, int(budget / 2 / trial))), _settling(size, trial)
            before = _other_threads()
            # Other programs only slow messages: the better of two counts where there is time for two.
            times = 2 if count >= 8 else 1
            count //= times
            queued = min(self.channel.queue([kind], buffers, count + 1, settling) for _ in range(times))
            if kind != "all_reduce" and (size >= PROBE_BYTES or size == self.sizes[-1]):
                self.communicating += _other_threads() - before
                self.carried += times * (count + 1 + settling) * size
            found = self.collectives.gather_objects((single, queued))
            alone, queued = (float(median(entry)) for entry in zip(*found, strict=True))
            self.single[kind][size] = alone
            # With so many in flight a message's own time is at most as many services: a bound, should `alone` be off.
            least = queued / (count + len(buffers))
            self.service[kind][size] = max(1e-7, min(alone, max(least, (queued - alone) / count)))

    def _too_slow(self, kind: Kind, size: int) -> bool:
        """Whether a size would take more than its part of the time, to judge by those before it."""
        found, index = self.service[kind], self.sizes.index(size)
        if size <= SMALL or index == 0:
            return False
        before = self.sizes[index - 1]
        return before not in found or 8 * found[before] * size / before > self.seconds / 8

    def _contention_size(self) -> tuple[int, float]:
        """The largest size whose messages are short, and what one of them takes in a queue."""
        times = {size: self.service["gather"][size] for size in self.service["gather"]}
        short = [size for size, seconds in times.items() if seconds <= MESSAGE_SECONDS and SMALL < size <= LARGE]
        size = max(short, default=min((size for size in times if size > SMALL), default=max(times)))
        return size, max(1e-6, times[size])

    def _control_seconds(self) -> float:
        flags = torch.zeros(64, dtype=torch.uint8)
        found = []
        for _ in range(15):
            started = time.perf_counter()
            self.collectives.wait(self.collectives.start_reach(flags), "the measurement of control messages")
            found.append(time.perf_counter() - started)
        return median(found[3:])

    def _shared(self, size: int, message: float) -> float:
        """The rate of a gather and a reduction side by side, each relative to itself alone."""
        self.progress("two channels at once")
        buffers = self.channel.buffers(size)
        both: tuple[Kind, ...] = ("gather", "reduce_scatter")
        count, settling = max(5, min(30, math.ceil(0.03 / message))), _settling(size, message)
        apart, together = [], []
        for _ in range(3):
            apart.append([self.channel.queue([kind], buffers, count, settling) for kind in both])
            together.append(self.channel.queue(both, buffers, count, settling))
        best = sum(min(entry) for entry in zip(*apart, strict=True)) / len(both)
        return min(1.0, max(0.1, self._agreed(best / max(min(together), 1e-9))))

    def _contention(self, size: int, message: float) -> tuple[float, float]:
        """How much compute and messages slow each other; gathers are in flight for as long as the rank computes."""
        self.progress("compute and messages at once")
        load = Load(self.channel.device)
        rounds = max(1, round(LOAD_SECONDS / max(1e-6, self._agreed(load.seconds))))
        queued = max(4, min(MOST_QUEUED, math.ceil(2 * LOAD_SECONDS / message)))
        buffers, settling = self.channel.buffers(size), _settling(size, message)
        slower, later = [], []
        for _ in range(CONTENTION_ROUNDS):
            quiet = self._compute(load, rounds)
            self.channel.queue(["gather"], buffers, 1, settling)
            begun = self.channel.clock.now()
            # More gathers than buffers: nobody reads what arrives.
            flight = [self.channel.start("gather", buffers[slot % len(buffers)], slot) for slot in range(queued)]
            noisy = self._compute(load, rounds)
            computed = ended = self.channel.clock.now()
            for pending in flight:
                ended = self.channel.finish("gather", pending)
            slower.append(noisy / quiet)
            # What is left when the compute ends goes on at full speed; the rest of the queue took the compute's time.
            during, after = self.channel.clock.between(begun, computed), self.channel.clock.between(computed, ended)
            later.append(during / max(0.25 * queued * message, queued * message - after))
        # Other programs only slow messages: the second best counts.
        return max(1.0, self._agreed(median(slower))), max(1.0, self._agreed(sorted(later)[1]))

    def _compute(self, load: Load, rounds: int) -> float:
        """Seconds of compute; where it leaves no core of this process idle, the CPU's seconds.

        On a full core what other threads of the process take is taken from the compute, and CPU time counts it without
        what other programs take meanwhile.
        """
        full = self.channel.device.type == "cpu" and available_cores() <= torch.get_num_threads()
        started, before = self.channel.clock.now(), time.process_time()
        for _ in range(rounds):
            load.round()
        wall = self.channel.clock.between(started, self.channel.clock.now())
        return (time.process_time() - before) / torch.get_num_threads() if full else wall


def links_changed(collectives: Local, links: Links, largest: int, *, device: torch.device | None = None) -> bool:
    """Whether the network is no longer the one that `links` was measured on: a few messages tell, on all ranks."""
    if not isinstance(collectives, Distributed):
        return False
    if links.world != collectives.world:
        return True
    channel = Channel(collectives, device or torch.device("cuda" if collectives.name == "nccl" else "cpu"))
    service = links.gather.service
    size = channel.rounded(min(PROBE_BYTES, largest))
    while size > 4 * SMALL and service(size) > MESSAGE_SECONDS:
        size = channel.rounded(size // 2)
    buffers = channel.buffers(size)
    count = max(6, min(60, math.ceil(PROBE_SECONDS / max(1e-6, service(size)))))
    expected = links.gather.alone(size) + count * service(size)
    for _ in range(3):  # what else a machine does may spoil one
        found = channel.queue(["gather"], buffers, count + 1, _settling(size, service(size)))
        ratio = float(median(collectives.gather_objects(found))) / expected
        if 1 - CHANGED <= ratio <= 1 / (1 - CHANGED):
            return False
    return True


def _settling(size: int, message: float) -> int:
    """How many messages go ahead of those that are measured."""
    return max(1, min(8, math.ceil(max(SETTLING / max(message, 1e-6), SETTLING_BYTES / size))))


def _other_threads() -> float:
    """CPU seconds of all threads of this process but the calling one."""
    return time.process_time() - time.thread_time()


def available_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
