"""Run a step's programs on the simulated machine, one step after the other, until one takes as long as the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.predict.costs import Costs
from weft.simulate.machine import COPIES, Machine, Message, Span
from weft.simulate.schedule import Event, Schedule
from weft.state.layout import Layout

STEPS = 4  # simulated at most: what one leaves in flight changes the next, hardly the one after
ALIKE = 1e-3


@dataclass(frozen=True)
class Timeline:
    """What a step will take.

    Attributes:
        seconds: a step among others, gathers of the one before still in flight.
        prologue_seconds: the first step, when nothing is.
        compute_seconds: ops, updates and what communication takes of the main thread.
        exposed_seconds: the part of `seconds` in which compute waits for communication.
        bound_seconds: less than any order of these ops and messages can take.
        peak_bytes: of memory on a rank, at its highest; 0 where it was not asked for.
        waits: how long each event waited, by the name of its node.
        spans: what happened when, in the last simulated step, for a drawing.
        memory: the parts of the memory at its peak.
    """

    seconds: float
    prologue_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bound_seconds: float
    peak_bytes: int = 0
    waits: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def critical_path(self) -> list[Span]:
        """What the step's length is made of: stretches of compute, and the messages that compute waited for."""
        return [span for span in self.spans if span.lane in ("compute", "wait")]


class Replay:
    """Runs programs' events on a machine, keeping what is in flight from one to the next."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        self.machine = Machine(costs.links)
        self.gathers: dict[int, Message] = {}
        self.reductions: dict[int, Message] = {}
        self.reloads: dict[int, Message] = {}
        self.control: Message | None = None
        self.norm: Message | None = None
        self.waits: dict[str, float] = {}
        self.waited = 0.0

    def program(self, schedule: Schedule, events: Sequence[Event] | None = None) -> None:
        events = schedule.events if events is None else events
        elapsed = schedule.elapsed
        at = 0
        for event in events:
            if event.at > at:
                self.machine.compute(elapsed[event.at] - elapsed[at])
                at = event.at
            self.event(event, accumulates=schedule.step.accumulate > 1)
        self.machine.compute(elapsed[-1] - elapsed[at])

    def event(self, event: Event, *, accumulates: bool) -> None:
        """Post, wait, or compute, as the executor would."""
        kind, machine = event.kind, self.machine
        if kind == "await_gather":
            self._wait(self.gathers.pop(event.bucket, None), event)
        elif kind == "await_reduce":
            self._wait(self.reductions.pop(event.bucket, None), event)
        elif kind == "await_reach":
            self._wait(self.control, event)
        elif kind == "await_norm":
            self._wait(self.norm, event)
        elif kind == "await_reload":
            self._wait(self.reloads.pop(event.bucket, None), event)
        machine.compute(self.costs.main_thread(event, self.layout, accumulates=accumulates), event.node.name)
        message = self.costs.message(event, self.layout)
        if message is None:
            return
        channel, latency, service = message
        posted = machine.post(channel, event.node.name, latency, service)
        if kind == "gather":
            self.gathers[event.bucket] = posted
        elif kind == "reduce":
            self.reductions[event.bucket] = posted
        elif kind == "announce":
            self.control = posted
        elif kind == "reload":
            self.reloads[event.bucket] = posted
        elif kind == "norm":
            self.norm = posted

    def _wait(self, message: Message | None, event: Event) -> None:
        if message is not None:
            waited = self.machine.wait(message)
            self.waits[event.node.name] = self.waits.get(event.node.name, 0.0) + waited
            self.waited += waited


def simulate(
    schedules: Sequence[Schedule],
    costs: Costs,
    events: Sequence[Sequence[Event]] | None = None,
    *,
    middles_left_out: int = 0,
) -> Timeline:
    """The timeline of a step that runs these programs one after the other.

    `events` stand in place of the schedules' own. `middles_left_out`: micro-steps like the last but one that the step
    has beyond those given.
    """
    replay = Replay(costs, schedules[0].step.layout)
    machine = replay.machine
    prologue = previous = seconds = exposed = 0.0
    waits: dict[str, float] = {}
    for number in range(STEPS):
        last = number == STEPS - 1 or (number > 1 and abs(seconds - previous) <= ALIKE * previous)
        previous, start = seconds, machine.now
        machine.recording = last
        waits, exposed, seconds = {}, 0.0, 0.0
        for index, schedule in enumerate(schedules):
            began, replay.waits, replay.waited = machine.now, {}, 0.0
            replay.program(schedule, None if events is None else events[index])
            times = 1 + middles_left_out * (index == len(schedules) - 2)
            seconds += times * (machine.now - began)
            exposed += times * replay.waited
            for name, waited in replay.waits.items():
                waits[name] = waits.get(name, 0.0) + times * waited
        prologue = prologue or seconds
        if last:
            break
    spans = tuple(Span(span.lane, span.name, span.start - start, span.end - start) for span in machine.spans)
    return Timeline(
        seconds=seconds,
        prologue_seconds=prologue,
        compute_seconds=seconds - exposed,
        exposed_seconds=exposed,
        bound_seconds=bound(schedules, costs, middles_left_out),
        waits=waits,
        spans=spans,
    )


def bound(schedules: Sequence[Schedule], costs: Costs, middles_left_out: int = 0) -> float:
    """What no order of these ops and messages can go below.

    Either the wire is always busy, or the compute stream is: and while messages flow it is slower, whenever that is.
    """
    layout, links = schedules[0].step.layout, costs.links
    compute, wire = 0.0, dict.fromkeys(("gathers", "reductions", COPIES), 0.0)
    for schedule in (*schedules, *([schedules[-2]] * middles_left_out if middles_left_out else ())):
        accumulates = schedule.step.accumulate > 1
        compute += schedule.elapsed[-1]
        for event in schedule.events:
            compute += costs.main_thread(event, layout, accumulates=accumulates)
            message = costs.message(event, layout)
            if message is not None and message[0] in wire:
                wire[message[0]] += message[2]
    # Where both channels share one wire their services add up; where they do not, the busier one decides.
    copies = wire.pop(COPIES)
    busy = max(max(wire.values()), sum(wire.values()) * (0.5 / max(links.shared, 0.5)))
    return max(busy, copies, compute + busy * (1 - 1 / links.compute_slowdown))
