"""The times of everything in a program: what the simulator asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from weft.measure.tiers import TierTimes
from weft.predict.links import Links
from weft.simulate.schedule import Event
from weft.state.layout import Bucket, Layout

LAUNCH = 2e-4  # seconds of the main thread to start a collective: its messages are posted one by one


@dataclass(frozen=True)
class UpdateTimes:
    """The optimizer's update: a part that every call takes and a part per element."""

    call_seconds: float
    element_seconds: float


@dataclass(frozen=True)
class Costs:
    """Times on one rank; ranks have agreed on them.

    Attributes:
        op: seconds of a traced op.
        links: the group's collectives, and how they and compute slow each other.
        update: the optimizer's update.
        bytes_per_second: of memory that is streamed through.
        tier, state_elements: copies to and from the next tier, and what an optimizer keeps per parameter element.
        node_seconds: what a step node itself takes of the main thread.
        source: tells these times from others: a plan made from the same ones is the same.
        scale: measured over predicted compute, once steps have been measured.
    """

    op: Callable[[fx.Node], float]
    links: Links
    update: UpdateTimes
    bytes_per_second: float
    source: str = ""
    tier: TierTimes | None = None
    state_elements: float = 0.0
    node_seconds: float = 1e-5
    scale: float = 1.0

    def scaled(self, factor: float) -> Costs:
        return replace(self, scale=self.scale * factor)

    def with_links(self, links: Links) -> Costs:
        return replace(self, links=links)

    def compute(self, node: fx.Node) -> float:
        # Programs are copies of one trace: what was looked up once travels with its nodes.
        seconds = node.meta.get("op_seconds")
        if seconds is None:
            seconds = node.meta["op_seconds"] = self.op(node)
        return seconds * self.scale

    def streamed(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_second

    def main_thread(self, event: Event, layout: Layout, *, accumulates: bool) -> float:
        """What an event takes of the compute stream itself, waiting apart."""
        kind = event.kind
        if event.bucket < 0:
            if kind != "norm":
                return self.node_seconds
            owned = sum(_owned_bytes(bucket, bucket.reduce.itemsize) for bucket in layout.buckets if bucket.trained)
            return self.streamed(owned) + sum(len(bucket.slots) for bucket in layout.buckets) * self.node_seconds
        bucket = layout.buckets[event.bucket]
        if bucket.dormant:
            return self.node_seconds
        if kind in ("gather", "reduce"):
            casts = kind == "gather" and bucket.compute != bucket.master
            copied = _owned_bytes(bucket, bucket.master.itemsize + bucket.compute.itemsize) if casts else 0
            return LAUNCH * (layout.world > 1) + self.streamed(copied)
        if kind == "await_reduce":
            owned = _owned_bytes(bucket, bucket.reduce.itemsize)
            # Each other rank's part is read and added to this one's; then all is scaled by the mean's factor.
            sums = layout.world - 1 if bucket.scatter else 0
            return self.node_seconds + self.streamed(owned * (3 * sums + 2 + 3 * accumulates))
        if kind == "update":
            elements = bucket.slice_numel if bucket.scatter else bucket.numel
            return self.update.call_seconds + elements * self.update.element_seconds
        return self.node_seconds

    def message(self, event: Event, layout: Layout) -> tuple[str, float, float] | None:
        """The channel, latency and service of the message that an event starts; None where it starts none."""
        if event.kind in ("reload", "offload"):
            if self.tier is None:
                return None
            nbytes = layout.fragment_bytes(event.bucket, self.state_elements)
            rate = self.tier.read_bytes_per_second if event.kind == "reload" else self.tier.write_bytes_per_second
            return "copies", self.tier.latency, nbytes / rate
        if layout.world == 1:
            return None
        if event.kind == "announce":
            return "control", self.links.small, 0.0
        if event.kind == "norm":
            return "reductions", self.links.small, 0.0
        if event.kind not in ("gather", "reduce") or layout.buckets[event.bucket].dormant:
            return None
        bucket = layout.buckets[event.bucket]
        if event.kind == "gather":
            nbytes, times, channel = bucket.bytes(bucket.compute), self.links.gather, "gathers"
        else:
            nbytes, channel = bucket.bytes(bucket.reduce), "reductions"
            times = self.links.reduce_scatter if bucket.scatter else self.links.all_reduce
        return channel, times.latency(nbytes), times.service(nbytes)


def _owned_bytes(bucket: Bucket, itemsize: int) -> int:
    return (bucket.slice_numel if bucket.scatter else bucket.numel) * itemsize
