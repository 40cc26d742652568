"""What messages between ranks take: curves over their size, and how much messages and compute slow each other.

Pure data and arithmetic. A channel (the gathers' or the reductions') serves its messages in order: a message that finds
it idle takes `alone`, every further one in a queue adds `service`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Kind = Literal["gather", "reduce_scatter", "all_reduce"]
KINDS: tuple[Kind, ...] = ("gather", "reduce_scatter", "all_reduce")
STEP = 4  # from one measured size to the next
SMALLEST = 4096  # bytes: below it the time of a message does not depend on its size


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes: straight between points, constant before the first, the last slope beyond the last."""

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise ValueError(
                f"a curve of {len(self.bytes)} sizes and {len(self.seconds)} times: it needs at least one, as many of "
                "each. Make it with Curve.fit"
            )
        if any(a >= b for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            raise ValueError(f"a curve over the sizes {self.bytes}: they must increase. Make it with Curve.fit")
        bad = next((time for time in self.seconds if not (math.isfinite(time) and time >= 0)), None)
        if bad is not None:
            raise ValueError(f"a time of {bad} s in a curve: times are finite and not negative. Measure again")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError(
                f"a curve with the times {self.seconds}: none may be below the one before it. Use Curve.fit"
            )

    @staticmethod
    def fit(points: Iterable[tuple[int, float]]) -> Curve:
        """The monotone curve nearest to measured points: a larger message never takes less.

        Neighbours that contradict it are pooled into their mean until none does (isotonic regression); several times of
        one size are its mean.
        """
        by_size: dict[int, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        sizes = sorted(by_size)
        pools: list[tuple[float, int, int]] = []  # mean, measurements, sizes
        for size in sizes:
            times = by_size[size]
            mean, weight, width = sum(times) / len(times), len(times), 1
            while pools and pools[-1][0] > mean:
                other, more, wider = pools.pop()
                mean = (other * more + mean * weight) / (more + weight)
                weight, width = weight + more, width + wider
            pools.append((mean, weight, width))
        return Curve(tuple(sizes), tuple(mean for mean, _, width in pools for _ in range(width)))

    def __call__(self, nbytes: float) -> float:
        sizes, seconds = self.bytes, self.seconds
        if nbytes <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_right(sizes, nbytes), len(sizes) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + slope * (nbytes - sizes[right - 1])

    def scaled(self, factor: float) -> Curve:
        return Curve(self.bytes, tuple(seconds * factor for seconds in self.seconds))

    def to_json(self) -> dict[str, Any]:
        return {"bytes": list(self.bytes), "seconds": list(self.seconds)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Curve:
        return Curve(tuple(map(int, value["bytes"])), tuple(map(float, value["seconds"])))


@dataclass(frozen=True)
class LinkTimes:
    """The times of one kind of collective, over the bytes of the whole bucket.

    Attributes:
        service: what one more message adds while others are in flight in its channel.
        alone: of one message by itself, from its start to the end of the wait.
    """

    service: Curve
    alone: Curve

    def latency(self, nbytes: float) -> float:
        """What passes in a message's time without occupying the channel."""
        return max(0.0, self.alone(nbytes) - self.service(nbytes))

    def scaled(self, factor: float) -> LinkTimes:
        return LinkTimes(self.service.scaled(factor), self.alone.scaled(factor))

    def to_json(self) -> dict[str, Any]:
        return {"service": self.service.to_json(), "alone": self.alone.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LinkTimes:
        return LinkTimes(Curve.from_json(value["service"]), Curve.from_json(value["alone"]))


@dataclass(frozen=True)
class Links:
    """What is known of the links between the ranks.

    Attributes:
        shared: rate of each of two channels (a gather and a reduction at once) relative to alone; 0.5: they share one
            wire, 1.0: they are independent.
        compute_slowdown: compute time while messages are in flight, over compute time alone.
        collective_slowdown: a message's time while this rank computes, over its time while the rank waits.
        cpu_seconds_per_byte: CPU time of the threads that communicate, per byte of the bucket that is gathered or
            reduce-scattered (an all-reduce moves twice as much).
        small: seconds of a control message.
    """

    world: int
    gather: LinkTimes
    reduce_scatter: LinkTimes
    all_reduce: LinkTimes
    shared: float
    compute_slowdown: float
    collective_slowdown: float
    cpu_seconds_per_byte: float
    small: float

    def times(self, kind: Kind) -> LinkTimes:
        found: LinkTimes = getattr(self, kind)
        return found

    def scaled(self, factor: float) -> Links:
        """Links on which every message takes `factor` times as long."""
        return replace(
            self,
            gather=self.gather.scaled(factor),
            reduce_scatter=self.reduce_scatter.scaled(factor),
            all_reduce=self.all_reduce.scaled(factor),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **{kind: self.times(kind).to_json() for kind in KINDS}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Links:
        return Links(
            world=int(value["world"]),
            gather=LinkTimes.from_json(value["gather"]),
            reduce_scatter=LinkTimes.from_json(value["reduce_scatter"]),
            all_reduce=LinkTimes.from_json(value["all_reduce"]),
            shared=float(value["shared"]),
            compute_slowdown=float(value["compute_slowdown"]),
            collective_slowdown=float(value["collective_slowdown"]),
            cpu_seconds_per_byte=float(value["cpu_seconds_per_byte"]),
            small=float(value["small"]),
        )


def sizes_up_to(largest: int) -> list[int]:
    """The bucket sizes that a curve has points at; the last is `largest` itself."""
    sizes = []
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= STEP
    return [*sizes, max(largest, SMALLEST)]


def wire_bytes(kind: Kind, nbytes: float, world: int) -> float:
    """Bytes that a rank sends, and receives, in one message of a whole bucket."""
    return nbytes * (world - 1) / world * (2 if kind == "all_reduce" else 1)


def default_links(world: int, *, gbit: float = 10.0, latency: float = 1e-4, efficiency: float = 0.95) -> Links:
    """Links from nominal figures, to plan without the machines.

    Every message takes its wire bytes at `efficiency` times `gbit` each way, as over full-duplex links with one card a
    rank, and `latency` seconds more; both channels share the wire, and messages cost compute nothing.
    """
    if world < 1 or not gbit > 0 or latency < 0 or not 0 < efficiency <= 1:
        raise ValueError(
            f"links of world {world}, {gbit} Gbit/s, latency {latency} s and efficiency {efficiency}: the world is at "
            "least 1, the rate positive, the latency not negative, the efficiency above 0 and at most 1"
        )
    rate = gbit * 1e9 / 8 * efficiency
    delay = latency if world > 1 else 0.0
    sizes = sizes_up_to(16 << 20)

    def times(kind: Kind) -> LinkTimes:
        service = [(size, wire_bytes(kind, size, world) / rate) for size in sizes]
        return LinkTimes(Curve.fit(service), Curve.fit((size, seconds + delay) for size, seconds in service))

    return Links(
        world=world,
        gather=times("gather"),
        reduce_scatter=times("reduce_scatter"),
        all_reduce=times("all_reduce"),
        shared=0.5,
        compute_slowdown=1.0,
        collective_slowdown=1.0,
        cpu_seconds_per_byte=0.0,
        small=2 * delay,
    )
