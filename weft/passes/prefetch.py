"""Overlap communication with compute: when gathers and reductions start, are waited for, and updates run.

Several ways of placing them are simulated, and the fastest that fits is taken, the one with the smallest buffers among
equals: a gather early enough to be hidden, not as early as possible. The published rule (as early as memory allows) is
`passes={"prefetch": {"rule": "earliest"}}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.graph import PassReport, Policy, StepGraph
from weft.passes.arrange import Arrangement, Arranger
from weft.passes.context import PlanContext
from weft.simulate.schedule import Schedule
from weft.simulate.timeline import Replay, simulate

EARLIEST = 1e6  # seconds; a plan is kept as JSON, which has no infinity
NEVER = -1.0
AHEAD = (1.0, 1.3, 2.0, 4.0, EARLIEST)
IN_FLIGHT = (2, 3, 4, 8)
BACKLOG = (NEVER, 0.0, 2e-3, 5e-3, 1e-2, 2e-2, EARLIEST)
URGENT = (0, 1, 2, 4)
MANY = 1000  # events: of a program with more every knob is turned once
SQUEEZES = 4
WORTH = 2e-3  # of the step: less gain than that is not worth larger buffers
PLAIN = Policy(ahead=0.0, in_flight=2, backlog=NEVER, urgent=0, room=1e18)


def prefetch(step: StepGraph, context: PlanContext) -> PassReport:
    """Place gathers, reductions, updates and the next step's gathers; sets the layout's order of the last, if open."""
    if step.layout.world == 1:
        return PassReport("prefetch", "one rank: nothing to overlap")
    if context.costs is None:
        return PassReport("prefetch", "the plain schedule stays")
    search = _Search(step, context)
    search.run(context.rule)
    if search.best is None:
        return PassReport("prefetch", "nothing that was tried is faster than the plain schedule", 0.0)
    moved = search.schedule.apply(search.best.events, by="prefetch")
    if context.choosing and search.best.next_order:
        step.layout = step.layout.with_next_order(search.best.next_order)
    step.policy = policy = search.policy
    early = f", gathers {policy.ahead:g} times their own time ahead" if search.arranger.gathers else ""
    return PassReport(
        "prefetch",
        f"{moved} of {len(search.best.events)} moved: {1e3 * search.before:.1f} -> {1e3 * search.seconds:.1f} ms a "
        f"micro-step; up to {policy.in_flight} reductions in flight{early}",
        search.before - search.seconds,
    )


class _Search:
    def __init__(self, step: StepGraph, context: PlanContext) -> None:
        assert context.costs is not None
        self.step, self.context, self.costs = step, context, context.costs
        self.schedule = Schedule(step, self.costs.compute)
        self.arranger = Arranger(self.schedule, self.costs, receives=context.receives)
        self.order = None if context.choosing else step.layout.next_order
        self.before = simulate([self.schedule], self.costs).seconds
        self.best: Arrangement | None = None
        plain = self._arrange(PLAIN)
        self.arranger.least = plain.curve
        # Without a budget: what the plain schedule takes, and one bucket gathered ahead.
        largest = max((b.bytes(b.compute) for b in step.layout.buckets if b.sharded), default=0)
        self.room = plain.buffers + largest if context.room is None else context.room
        self.policy = replace(PLAIN, room=self.room)
        self.seconds, self.buffers = self.before, plain.buffers

    def _arrange(self, policy: Policy) -> Arrangement:
        """Events under a policy, as they come out once the step before has run by them too."""
        replay = Replay(self.costs, self.step.layout)
        replay.program(self.schedule)
        found = self.arranger.arrange(replay, policy, self.order)
        # What it leaves in flight differs from what the plain program does: once more behind itself.
        return self.arranger.arrange(replay, policy, self.order if self.order is not None else found.next_order)

    def seconds_of(self, found: Arrangement) -> float:
        return simulate([self.schedule], self.costs, [found.events]).seconds

    def run(self, rule: str) -> None:
        """Find the best arrangement: one knob after the other, each with the others at their best."""
        if self.context.policy is not None:
            self.take(self.context.policy)
        elif rule == "earliest":
            self.take(Policy(EARLIEST, 2, EARLIEST, 0, self.room))
        else:
            self.search()

    def take(self, policy: Policy) -> None:
        self.best, self.policy = self._arrange(policy), policy
        self.seconds = self.seconds_of(self.best)

    def search(self) -> None:
        knobs: list[tuple[str, Sequence[float]]] = [("in_flight", IN_FLIGHT)]
        if self.arranger.next_gathers:
            knobs += [("backlog", BACKLOG), ("urgent", URGENT)]
        if self.arranger.gathers:
            knobs.append(("ahead", AHEAD))
        seen: set[Policy] = set()
        rounds = 1 if len(self.schedule.events) > MANY else 2
        for name, values in knobs * rounds:
            for value in values:
                policy = replace(self.policy, room=self.room, **{name: value})  # type: ignore[arg-type]
                if policy not in seen:
                    seen.add(policy)
                    self.consider(policy)

    def consider(self, policy: Policy) -> None:
        """Take a policy if it is faster and fits, or as fast with smaller buffers."""
        found = self._arrange(policy)
        for _ in range(SQUEEZES if self.arranger.gathers else 0):
            # Reductions end later than they did without gathers ahead of them: those get less room.
            if found.buffers <= self.room:
                break
            policy = replace(policy, room=policy.room - 2 * (found.buffers - self.room))
            found = self._arrange(policy)
        seconds = self.seconds_of(found)
        excess, least = max(found.buffers - self.room, 0), max(self.buffers - self.room, 0)
        if excess != least:
            better = excess < least
        elif abs(seconds - self.seconds) <= WORTH * self.seconds:
            better = (found.buffers, seconds) < (self.buffers, self.seconds)
        else:
            better = seconds < self.seconds
        if better:
            self.best, self.policy, self.seconds, self.buffers = found, policy, seconds, found.buffers
