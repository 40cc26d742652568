"""The simulated machine against timelines whose times are known by hand, and what must hold of every simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tests.test_passes import MODES, lay_out, options, random_models, trace
from weft import graph as g
from weft.graph import StepGraph, Variant
from weft.measure.tiers import TierTimes
from weft.passes.candidate import MIDDLES, timeline_of, variants
from weft.passes.context import PlanContext
from weft.passes.pipeline import build_program
from weft.predict.costs import Costs, UpdateTimes
from weft.predict.links import Curve, Links, LinkTimes, default_links
from weft.simulate.schedule import Schedule
from weft.simulate.timeline import Timeline, simulate
from weft.state.layout import Layout, ParameterInfo, Traits, _assemble

Script = Sequence[tuple[str, Any]]
REDUCE = 1.0  # service of a reduction, unless a test says otherwise
KIND: dict[str, Callable[..., Any]] = {f.__name__: f for f in g.STEP_NODES}


def work() -> None:
    """What compute is in these programs."""


def layout(buckets: int = 4, sharded: bool = True) -> Layout:
    members = [
        ParameterInfo(i, f"p{i}", (256,), (1,), 256, *(torch.float32, 0, *[torch.float32] * 3)) for i in range(buckets)
    ]
    made = _assemble([([member], False) for member in members], "zero3", 2)
    return made.with_traits({i: Traits(True, True, sharded) for i in range(buckets)})


def program(script: Script, *, sharded: bool = True, variant: Variant = "only", accumulate: int = 1) -> StepGraph:
    """Compute of so many seconds, and step nodes on so many buckets, in order."""
    graph = fx.Graph()
    run = graph.placeholder("run")
    for what, value in script:
        if what == "compute":
            graph.call_function(work).meta["op_seconds"] = value
        else:
            g.add_step_node(graph, KIND[what], run, *([] if value is None else [value]), by="test")
    graph.output(())
    return StepGraph(graph, {}, layout(sharded=sharded), variant, accumulate, clip=False, whole_update=False)


def constant(service: float, latency: float = 0.0) -> LinkTimes:
    return LinkTimes(Curve((1,), (service,)), Curve((1,), (service + latency,)))


def links(gather: float = 0.0, reduce: float = REDUCE, latency: float = 0.0, **more: Any) -> Links:
    given_ = {"shared": 0.5, "compute_slowdown": 1.0, "collective_slowdown": 1.0, **more}
    return Links(
        world=2,
        gather=constant(gather, latency),
        reduce_scatter=constant(reduce, latency),
        all_reduce=constant(reduce, latency),
        cpu_seconds_per_byte=0.0,
        small=0.0,
        **given_,
    )


def costs_of(found: Links, **more: Any) -> Costs:
    return Costs(lambda node: 0.0, found, UpdateTimes(0.0, 0.0), 1e30, node_seconds=0.0, **more)


@pytest.fixture(autouse=True)
def _nothing_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.predict.costs.LAUNCH", 0.0)


def run(script: Script, found: Links, sharded: bool = True, **more: Any) -> Timeline:
    costs = costs_of(found, **more)
    result = simulate([Schedule(program(script, sharded=sharded), costs.compute)], costs)
    assert sum(result.waits.values()) == pytest.approx(result.exposed_seconds)
    assert result.compute_seconds + result.exposed_seconds == pytest.approx(result.seconds)
    assert result.bound_seconds <= result.seconds * (1 + 1e-9)
    return result


def one_gather(before: float, after: float) -> Script:
    return [("gather", 0), ("compute", before), ("await_gather", 0), ("compute", after), ("release", 0)]


def test_compute_alone_takes_its_own_time() -> None:
    found = run([("compute", 1.5), ("compute", 0.25), ("compute", 2.0)], links())
    assert found.seconds == found.prologue_seconds == found.bound_seconds == pytest.approx(3.75)
    assert found.exposed_seconds == 0


def test_a_gather_hides_behind_compute_that_is_as_long() -> None:
    found = run(one_gather(3.0, 1.0), links(gather=3.0))
    assert found.seconds == pytest.approx(4.0)
    assert found.exposed_seconds == pytest.approx(0.0, abs=1e-9)


def test_what_compute_does_not_hide_of_a_gather_is_exposed() -> None:
    found = run(one_gather(1.0, 2.0), links(gather=3.0))
    assert found.seconds == pytest.approx(5.0)
    assert found.exposed_seconds == pytest.approx(2.0)
    assert found.waits == {"await_gather_0": pytest.approx(2.0)}
    assert [(s.lane, s.start, s.end) for s in found.critical_path] == [
        ("compute", 0.0, pytest.approx(1.0)),
        ("wait", pytest.approx(1.0), pytest.approx(3.0)),
        ("compute", pytest.approx(3.0), pytest.approx(5.0)),
    ]


def both_channels(first: str) -> Script:
    waits = {"gather": ("await_gather", 0), "reduce": ("await_reduce", 1)}
    second = "reduce" if first == "gather" else "gather"
    return [("gather", 0), ("reduce", 1), waits[first], ("compute", 0.0), waits[second], ("release", 0)]


@pytest.mark.parametrize(
    ("shared", "gather", "reduce", "gathered", "whole"),
    [
        (0.5, 2.0, 2.0, 4.0, 4.0),  # one wire: each at half its rate
        (1.0, 2.0, 2.0, 2.0, 2.0),  # two wires
        (0.5, 1.0, 3.0, 2.0, 4.0),  # half as fast until the gather is through
        (0.75, 1.5, 3.0, 2.0, 3.5),
        (0.1, 1.0, 1.0, 2.0, 2.0),  # a wire is shared at worst
    ],
)
def test_two_channels_share_a_wire(shared: float, gather: float, reduce: float, gathered: float, whole: float) -> None:
    found = run(both_channels("gather"), links(gather, reduce, shared=shared))
    assert found.waits.get("await_gather_0") == pytest.approx(gathered)
    assert found.seconds == pytest.approx(whole)
    other = run(both_channels("reduce"), links(gather, reduce, shared=shared))
    assert other.seconds == pytest.approx(whole), "whichever is waited for first"


def test_messages_of_a_channel_are_served_in_the_order_in_which_they_were_posted() -> None:
    script = [("gather", 0), ("gather", 1), ("await_gather", 1), ("await_gather", 0), ("release", 0), ("release", 1)]
    found = run(script, links(gather=2.0))
    assert found.waits["await_gather_1"] == pytest.approx(4.0)
    assert found.waits["await_gather_0"] == 0


def test_a_latency_delays_a_message_and_does_not_occupy_its_channel() -> None:
    assert run(one_gather(0.0, 0.0), links(gather=2.0, latency=1.0)).seconds == pytest.approx(3.0)
    script = [("gather", 0), ("gather", 1), ("await_gather", 0), ("await_gather", 1), ("release", 0), ("release", 1)]
    found = run(script, links(gather=2.0, latency=1.0))
    assert found.seconds == pytest.approx(5.0), "the second one's latency passes meanwhile"
    # While a message is under way but not on the wire, compute runs at its full rate.
    slow = links(gather=2.0, latency=1.0, compute_slowdown=2.0)
    assert run(one_gather(1.0, 0.0), slow).seconds == pytest.approx(3.0)


def test_messages_in_flight_slow_compute() -> None:
    found = run(one_gather(5.0, 0.0), links(gather=3.0, compute_slowdown=2.0))
    assert found.seconds == pytest.approx(6.5), "1.5 s of work in the 3 s of the message, then 3.5 s"
    assert found.bound_seconds == pytest.approx(6.5)
    assert found.exposed_seconds == pytest.approx(0.0, abs=1e-9)


def test_compute_slows_messages_in_flight_and_waiting_does_not() -> None:
    slow = links(gather=3.0, collective_slowdown=1.5)
    assert run(one_gather(5.0, 0.0), slow).seconds == pytest.approx(5.0)
    assert run(one_gather(4.5, 0.0), slow).exposed_seconds == pytest.approx(0.0, abs=1e-6)
    assert run(one_gather(3.0, 0.0), slow).seconds == pytest.approx(4.0), "2 of 3 s are served while it computes"
    assert run(one_gather(0.0, 1.0), slow).seconds == pytest.approx(4.0)


def test_a_gather_over_the_boundary_is_waited_for_by_the_next_step() -> None:
    script = [("compute", 1.0), ("await_gather", 0), ("compute", 1.0), ("gather", 0)]
    found = run(script, links(gather=3.0), sharded=False)
    assert found.prologue_seconds == pytest.approx(2.0), "nothing is in flight yet"
    assert found.seconds == pytest.approx(4.0)
    assert found.exposed_seconds == pytest.approx(2.0)
    served = next(span for span in found.spans if span.lane == "gathers")
    assert (served.start, served.end) == (pytest.approx(0.0), pytest.approx(3.0))


def test_a_wire_that_is_never_idle_bounds_the_step() -> None:
    script = [("await_gather", 0), ("await_gather", 1), ("compute", 1.0), ("gather", 0), ("gather", 1)]
    found = run(script, links(gather=4.0), sharded=False)
    assert found.bound_seconds == pytest.approx(8.0)
    assert found.seconds == pytest.approx(9.0)


def micro_steps(k: int) -> list[StepGraph]:
    body: Script = one_gather(1.0, 2.0)
    reduction: Script = [("reduce", 1), ("compute", 1.0), ("await_reduce", 1)]
    order = variants(k)
    return [
        program([*body, *(reduction if v == "last" else [("compute", 0.5)])], variant=v, accumulate=k) for v in order
    ]


@pytest.mark.parametrize("k", [3, 5, 9])
def test_micro_steps_that_are_left_out_count_as_those_that_are_simulated(k: int) -> None:
    costs = costs_of(links(gather=2.5, reduce=3.0))
    every = [Schedule(step, costs.compute) for step in micro_steps(k)]
    whole = simulate(every, costs)
    # first: 1 + 1.5 waited + 2 + 0.5; last: the reduction of 3 s instead of the 0.5 s.
    assert whole.seconds == pytest.approx(5.0 * k + 2.5)
    assert whole.exposed_seconds == pytest.approx(1.5 * k + 2.0)
    for simulated in range(1, k - 2):
        short = [*every[: 1 + simulated], every[-1]]
        found = simulate(short, costs, middles_left_out=k - len(short))
        assert found.seconds == pytest.approx(whole.seconds)
        assert found.exposed_seconds == pytest.approx(whole.exposed_seconds)
        assert found.bound_seconds == pytest.approx(whole.bound_seconds)
        assert found.prologue_seconds == pytest.approx(whole.prologue_seconds)
        assert found.waits == {name: pytest.approx(seconds) for name, seconds in whole.waits.items()}


def test_a_step_of_many_micro_steps_is_as_long_as_all_of_them() -> None:
    k = MIDDLES + 9
    costs = costs_of(links(gather=2.5, reduce=3.0))
    programs = dict(zip(("first", "middle", "last"), [*micro_steps(k)[:2], micro_steps(k)[-1]], strict=True))
    found = timeline_of(programs, k, costs)  # type: ignore[arg-type]
    assert found.seconds == pytest.approx(5.0 * k + 2.5)
    assert sum(found.waits.values()) == pytest.approx(found.exposed_seconds)


def test_copies_do_not_share_the_wire_and_do_not_slow_compute() -> None:
    tier = TierTimes(latency=0.0, read_bytes_per_second=256 / 2, write_bytes_per_second=256 / 2)
    more = {"tier": tier, "state_elements": 0.5}  # 128 floats of a slice: 256 bytes, 2 s
    script = [("reload", 0), ("gather", 1), ("await_gather", 1), ("await_reload", 0), ("release", 1)]
    found = run(script, links(gather=2.0), **more)
    assert found.waits["await_gather_1"] == pytest.approx(2.0)
    assert found.seconds == pytest.approx(2.0)
    slow = links(gather=2.0, compute_slowdown=2.0)
    assert run([("reload", 0), ("compute", 5.0), ("await_reload", 0)], slow, **more).seconds == pytest.approx(5.0)
    assert run([("reload", 0), ("compute", 0.5), ("await_reload", 0)], slow, **more).seconds == pytest.approx(2.0)


# ---- whatever the program ----


@st.composite
def random_costs(draw: Any, world: int) -> Costs:
    made = default_links(
        world, gbit=draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0])), latency=draw(st.sampled_from([0, 1e-3]))
    )
    made = replace(
        made,
        shared=draw(st.sampled_from([0.1, 0.5, 0.7, 1.0])),
        compute_slowdown=draw(st.sampled_from([1.0, 1.3, 3.0])),
        collective_slowdown=draw(st.sampled_from([1.0, 1.2, 4.0])),
    )
    op = draw(st.sampled_from([1e-6, 1e-4, 1e-2]))
    return Costs(lambda node: op, made, UpdateTimes(1e-5, 1e-9), 1e10)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    model=random_models(),
    mode=st.sampled_from(MODES),
    world=st.integers(2, 5),
    accumulate=st.sampled_from([1, 2, 3, 9]),
    clip=st.booleans(),
    prefetch=st.booleans(),
    data=st.data(),
)
def test_no_step_is_faster_than_its_bound_and_waits_are_what_is_exposed(
    model: nn.Module, mode: str, world: int, accumulate: int, clip: bool, prefetch: bool, data: Any
) -> None:
    costs = data.draw(random_costs(world))
    traced = trace(model, torch.randn(2, model.layers[0].in_features))  # type: ignore[union-attr,operator,arg-type,index]
    made = lay_out(model, traced, mode, world, 500)
    chosen = options(accumulate, clip, prefetch=prefetch)
    context = PlanContext(costs, receives=True)
    programs = {
        variant: build_program(traced, made, chosen, variant, whole_update=False, context=context)
        for variant in variants(accumulate)
    }
    found = timeline_of(programs, accumulate, costs)
    assert found.bound_seconds <= found.seconds * (1 + 2e-3)
    assert found.compute_seconds >= sum(
        Schedule(programs[variant], costs.compute).elapsed[-1] for variant in variants(accumulate)
    ) * (1 - 1e-6)
    assert sum(found.waits.values()) == pytest.approx(found.exposed_seconds)
    assert all(waited >= 0 for waited in found.waits.values())
    assert 0 <= found.exposed_seconds <= found.seconds
