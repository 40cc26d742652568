"""One rank as the simulator sees it: a stream of compute, and channels on which messages go one after the other.

Ranks are alike, so one stands for all. Messages of a channel are served in the order in which they were posted, as gloo
and NCCL serve those of a group. Two channels that are busy at once share the wire, and compute and communication slow
each other, by the factors measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from weft.predict.links import Links

EPSILON = 1e-12
COPIES = "copies"  # to and from the next tier of memory: not on the wire


@dataclass(slots=True)
class Message:
    """A collective: ready to be served after its latency, done after its service."""

    name: str
    channel: str
    posted: float
    ready: float
    left: float  # seconds of service at the channel's full rate
    began: float = -1.0
    done: float = -1.0


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a lane of the timeline."""

    lane: str
    name: str
    start: float
    end: float


class Machine:
    """Runs compute and messages against each other; `now` is the time of the compute stream."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.now = 0.0
        self.queues: dict[str, deque[Message]] = {}
        self.spans: list[Span] = []
        self.recording = False

    def post(self, channel: str, name: str, latency: float, service: float) -> Message:
        message = Message(name, channel, self.now, self.now + latency, service)
        self.queues.setdefault(channel, deque()).append(message)
        return message

    def compute(self, seconds: float, name: str = "compute") -> None:
        start = self.now
        self._advance(seconds, None)
        if self.recording and self.now > start:
            self.spans.append(Span("compute", name, start, self.now))

    def wait(self, message: Message) -> float:
        """Let time pass until a message is done; returns how long that took."""
        start = self.now
        if message.done < 0:
            self._advance(float("inf"), message)
        if self.recording and self.now > start:
            self.spans.append(Span("wait", message.name, start, self.now))
        return self.now - start

    def backlog(self) -> float:
        """Seconds of service that all channels have before them."""
        return sum(message.left for queue in self.queues.values() for message in queue)

    def _advance(self, work: float, until: Message | None) -> None:
        links = self.links
        computing = until is None
        while True:
            flowing: list[Message] = []
            event = float("inf")
            for queue in self.queues.values():
                if queue:
                    head = queue[0]
                    if head.ready <= self.now + EPSILON:
                        flowing.append(head)
                        if head.began < 0:
                            head.began = self.now
                    elif head.ready - self.now < event:
                        event = head.ready - self.now
            rate, speed = 1.0, 1.0
            if flowing:
                on_wire = sum(head.channel != COPIES for head in flowing)
                if on_wire > 1:
                    rate = max(links.shared, 1.0 / on_wire)
                if computing and on_wire:
                    rate /= links.collective_slowdown
                    speed = 1.0 / links.compute_slowdown
                for head in flowing:
                    left = head.left if head.channel == COPIES else head.left / rate
                    if left < event:
                        event = left
            elif until is not None and event == float("inf"):
                raise AssertionError(f"{until.name} is waited for and will never be done")
            finished = computing and work <= event * speed
            step = work / speed if finished else event
            self.now += step
            for head in flowing:
                head.left -= step if head.channel == COPIES else step * rate
                if head.left <= EPSILON:
                    head.left, head.done = 0.0, self.now
                    self.queues[head.channel].popleft()
                    if self.recording:
                        self.spans.append(Span(head.channel, head.name, head.began, head.done))
            if finished:
                return
            work -= step * speed
            if until is not None and until.done >= 0:
                return
