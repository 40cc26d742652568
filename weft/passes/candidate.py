"""One way to lay a step out, planned, simulated and weighed: what the choice among modes and residencies compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weft.graph import StepGraph, Variant
from weft.measure.tiers import TierTimes
from weft.options import Options
from weft.passes.context import PlanContext
from weft.passes.pipeline import build_program
from weft.passes.shard import gather_order, next_order
from weft.predict.costs import Costs
from weft.simulate.memory import ARENA, MemoryCurve, loose_bytes, predict_memory
from weft.simulate.schedule import Schedule
from weft.simulate.timeline import Timeline, simulate
from weft.state.layout import Layout, ParameterInfo, Traits, make_layout
from weft.state.offload import choose_fragments
from weft.trace.capture import Trace

ROOMS = 4  # sizes of buffers that are tried where a plan is over the budget
MIDDLES = 3  # micro-steps in the middle that are simulated; the others are as long as the last of these


@dataclass(frozen=True)
class Problem:
    """What is planned, from what, and what may be spent.

    Attributes:
        state_elements, update_elements: of the optimizer, kept and temporary, per parameter element.
        whole_update: the optimizer needs whole tensors.
        budget: bytes of a rank.
        thrifty: buffers are kept as few as the plain schedule's, since the user asked for little memory.
    """

    trace: Trace
    parameters: Sequence[ParameterInfo]
    options: Options
    world: int
    costs: Costs | None
    receives: bool
    bucket_bytes: int
    state_elements: float
    update_elements: float
    whole_update: bool
    buffer_bytes: int
    budget: int
    thrifty: bool
    device: torch.device
    tier: Callable[[], TierTimes]  # measures it, when it is asked for

    def timing_copies(self) -> Problem:
        """The problem with copies to and from the next tier timed."""
        if self.costs is None or self.costs.tier is not None:
            return self
        costs = replace(self.costs, tier=self.tier(), state_elements=self.state_elements)
        return replace(self, costs=costs)

    def layout(self, mode: str) -> Layout:
        plain = make_layout(
            self.parameters,
            self.trace,
            mode=mode,
            world=self.world,
            bucket_bytes=self.bucket_bytes,
        )
        plain = choose_fragments(plain, self.options, self.device, elementwise=not self.whole_update)
        return self.ordered(plain)

    def with_traits(self, layout: Layout, traits: Mapping[int, Traits]) -> Layout:
        return self.ordered(layout.with_traits(traits))

    def ordered(self, layout: Layout) -> Layout:
        layout = layout.with_next_order(next_order(self.trace, layout))
        return layout.with_gather_order(gather_order(self.trace, layout))


@dataclass(frozen=True)
class Candidate:
    """A layout with its programs; `timeline` is None where nothing could be timed."""

    name: str
    layout: Layout
    programs: Mapping[Variant, StepGraph]
    memory: MemoryCurve
    timeline: Timeline | None

    @property
    def seconds(self) -> float:
        return 0.0 if self.timeline is None else self.timeline.seconds

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes


def variants(micro_batches: int) -> list[Variant]:
    """The programs of a step, in order."""
    if micro_batches == 1:
        return ["only"]
    middle: list[Variant] = ["middle"] * (micro_batches - 2)
    return ["first", *middle, "last"]


def plan_programs(problem: Problem, layout: Layout, room: float | None) -> tuple[Layout, dict[Variant, StepGraph]]:
    """The programs of a layout; what ends the step decides in which order it gathers for the next."""
    programs: dict[Variant, StepGraph] = {}
    for variant in dict.fromkeys(reversed(variants(problem.options.accumulate))):
        context = PlanContext(
            problem.costs, problem.receives, room, rule=problem.options.prefetch_rule, choosing=not programs
        )
        programs[variant] = build_program(
            problem.trace, layout, problem.options, variant, whole_update=problem.whole_update, context=context
        )
        layout = programs[variant].layout
    return layout, programs


def room_of(problem: Problem, layout: Layout) -> float | None:
    """Bytes for buffers that come and go; None: as many as the plain schedule takes."""
    if problem.thrifty or problem.costs is None:
        return None
    # What the plain programs need beside their buffers is needed whatever the passes do.
    plain = _memory(problem, layout, plan_programs(replace(problem, costs=None), layout, None)[1])
    return max(problem.budget - (plain.peak_bytes - plain.parts[ARENA]), 0)


def evaluate(problem: Problem, layout: Layout, name: str) -> Candidate:
    """Plan, simulate and weigh a layout."""
    room = room_of(problem, layout)
    tried = []
    for number in range(ROOMS):
        tried.append(_weighed(problem, layout, room))
        over = tried[-1][2].peak_bytes - problem.budget
        if room is None or over <= 0 or room <= 0:
            break
        # Buffers do not lie in the arena without gaps: there is less room than there seemed to be.
        room = max(room - over, 0) if number < ROOMS - 2 else 0
    layout, programs, memory = min(tried, key=lambda entry: entry[2].peak_bytes)
    timeline = None
    if problem.costs is not None:
        timeline = timeline_of(programs, problem.options.accumulate, problem.costs)
        timeline = replace(timeline, peak_bytes=memory.peak_bytes, memory=memory.parts)
    return Candidate(name, layout, programs, memory, timeline)


def _weighed(
    problem: Problem, layout: Layout, room: float | None
) -> tuple[Layout, dict[Variant, StepGraph], MemoryCurve]:
    layout, programs = plan_programs(problem, layout, room)
    return layout, programs, _memory(problem, layout, programs)


def timeline_of(programs: Mapping[Variant, StepGraph], micro_batches: int, costs: Costs) -> Timeline:
    """The simulated step."""
    schedules = {variant: Schedule(step, costs.compute) for variant, step in programs.items()}
    order = variants(micro_batches)
    simulated = _few(order)
    return simulate([schedules[variant] for variant in simulated], costs, middles_left_out=len(order) - len(simulated))


def _few(order: list[Variant]) -> list[Variant]:
    return [*order[: 1 + MIDDLES], *order[max(len(order) - 1, 1 + MIDDLES) :]]


def memory_of(
    programs: Mapping[Variant, StepGraph],
    layout: Layout,
    micro_batches: int,
    *,
    state_elements: float,
    update_elements: float,
    receives: bool,
    parameters: Sequence[ParameterInfo],
    buffer_bytes: int,
    cpu: bool,
) -> MemoryCurve:
    """The predicted memory of a rank through a step."""
    return predict_memory(
        [programs[variant] for variant in _few(variants(micro_batches))],
        layout,
        state_elements=state_elements,
        update_elements=update_elements,
        accumulate=micro_batches,
        receives=receives,
        loose_bytes=loose_bytes(parameters, layout),
        buffer_bytes=buffer_bytes,
        cpu=cpu,
    )


def _memory(problem: Problem, layout: Layout, programs: Mapping[Variant, StepGraph]) -> MemoryCurve:
    return memory_of(
        programs,
        layout,
        problem.options.accumulate,
        state_elements=problem.state_elements,
        update_elements=problem.update_elements,
        receives=problem.receives,
        parameters=problem.parameters,
        buffer_bytes=problem.buffer_bytes,
        cpu=problem.device.type == "cpu",
    )
