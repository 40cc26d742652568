"""What planning decides, for several ranks in one process: memory, time, files, and what is said about them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from tests.models import TiedGPT, ids
from tests.test_passes import CPU, MODES, lay_out, options, random_models, trace
from weft import graph as g
from weft.errors import PlanError, StoreError
from weft.measure.tiers import TierTimes
from weft.options import check_options
from weft.passes.auto import TooLittle, auto
from weft.passes.candidate import Problem, evaluate, room_of, timeline_of, variants
from weft.passes.context import PlanContext
from weft.passes.lifetimes import leases
from weft.passes.pipeline import build_program
from weft.passes.prefetch import WORTH
from weft.passes.unshard import Choice, _fill
from weft.passes.validate import check
from weft.plans import planner
from weft.plans.decisions import Decisions
from weft.predict.costs import Costs, UpdateTimes
from weft.predict.links import default_links
from weft.state.layout import ParameterInfo, Traits

EVERYTHING = 1 << 50
DISK = TierTimes(write_bytes_per_second=5e7, read_bytes_per_second=5e7, latency=1e-4)


def synthetic(world: int = 2, gbit: float = 1.0, op: float = 2e-3, tier: TierTimes | None = None) -> Costs:
    links = default_links(world, gbit=gbit)
    return Costs(
        lambda node: op, links, UpdateTimes(1e-5, 1e-9), 1e10, source=f"{gbit} {op}", tier=tier, state_elements=2.0
    )


def infos(model: nn.Module) -> list[ParameterInfo]:
    return [
        ParameterInfo(
            i, name, tuple(p.shape), p.stride(), p.numel(), p.dtype, 0 if p.requires_grad else None, *[p.dtype] * 3
        )
        for i, (name, p) in enumerate(model.named_parameters())
    ]


def problem(
    model: nn.Module,
    batch: Any,
    *,
    mode: str = "auto",
    memory: int | None = EVERYTHING,
    accumulate: int = 1,
    clip: bool = False,
    costs: Costs | None = None,
    world: int = 2,
    bucket_bytes: int = 300_000,
    passes: dict[str, Any] | None = None,
    offload: str = "auto",
) -> Problem:
    """As `weft.compile` would pose it."""
    chosen = check_options(
        mode=mode,
        memory=memory,
        accumulate=accumulate,
        clip_norm=1.0 if clip else None,
        precision=None,
        fuse="auto",
        offload=offload,
        passes=passes,
        seed=None,
        cache_dir=None,
        mesh=None,
        timeout=60,
        debug=False,
    )
    loss = (lambda m, x: m(x).square().mean()) if isinstance(model, nn.Sequential) else None
    return Problem(
        trace=trace(model, batch, loss),
        parameters=infos(model),
        options=chosen,
        world=world,
        costs=costs or synthetic(world),
        receives=True,
        bucket_bytes=bucket_bytes,
        state_elements=2.0,
        update_elements=1.0,
        whole_update=False,
        buffer_bytes=0,
        budget=EVERYTHING if memory is None else memory,
        thrifty=mode == "zero3" and memory is None,
        device=CPU,
        tier=lambda: DISK,
    )


def wide(layers: int = 3, width: int = 512) -> nn.Module:
    """Parameters that weigh more than anything else."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


def wide_problem(**more: Any) -> Problem:
    return problem(wide(), torch.randn(8, 512), **more)


# ---- prefetch ----


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    model=random_models(),
    mode=st.sampled_from(MODES),
    world=st.integers(2, 5),
    accumulate=st.sampled_from([1, 3]),
    clip=st.booleans(),
    gbit=st.sampled_from([0.01, 0.1, 1.0, 50.0]),
    op=st.sampled_from([1e-6, 1e-5, 1e-3]),
)
def test_prefetch_never_makes_a_step_slower(
    model: nn.Module, mode: str, world: int, accumulate: int, clip: bool, gbit: float, op: float
) -> None:
    costs = synthetic(world, gbit, op)
    traced = trace(model, torch.randn(2, model.layers[0].in_features))  # type: ignore[union-attr,operator,arg-type,index]
    layout = lay_out(model, traced, mode, world, 500)
    context = PlanContext(costs, receives=True)

    def seconds(**passes: Any) -> float:
        chosen = options(accumulate, clip, **passes)
        built = {
            variant: build_program(traced, layout, chosen, variant, whole_update=False, context=context)
            for variant in variants(accumulate)
        }
        return timeline_of(built, accumulate, costs).seconds

    # A little time may be given for smaller buffers, and a program is judged as if it followed itself.
    assert seconds() <= seconds(prefetch=False) * (1 + 5 * WORTH)


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0, 3.0])
def test_buffers_stay_within_the_room(share: float) -> None:
    model = TiedGPT(width=64, layers=2)
    traced = trace(model, ids(torch.Generator().manual_seed(0)))
    layout = lay_out(model, traced, "zero3", 2, 20_000)

    def most(room: float | None, **passes: Any) -> int:
        context = PlanContext(synthetic(2, 0.1, 1e-4), receives=True, room=room)
        step = build_program(traced, layout, options(1, False, **passes), "only", whole_update=False, context=context)
        found = leases(step, receives=True)
        return max(
            sum(lease.nbytes for lease in found if lease.start <= at <= lease.stop)
            for at in range(len(step.graph.nodes))
        )

    plain = most(None, prefetch=False)
    room = plain + share * sum(bucket.bytes(bucket.compute) for bucket in layout.buckets)
    assert plain < most(room) <= room, "more than the plain schedule's is used, and not more than there is"
    assert most(room, prefetch={"rule": "earliest"}) <= room


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_gather_that_is_just_early_enough_takes_no_more_memory_than_the_earliest(accumulate: int) -> None:
    base = problem(
        TiedGPT(width=64, layers=2),
        ids(torch.Generator().manual_seed(0)),
        mode="zero3",
        accumulate=accumulate,
        costs=synthetic(2, 1.0, 1e-3),
        bucket_bytes=20_000,
    )
    earliest = replace(base, options=replace(base.options, passes={"prefetch": {"rule": "earliest"}}))
    hidden, early = (evaluate(p, p.layout("zero3"), "zero3") for p in (base, earliest))
    assert hidden.peak_bytes <= early.peak_bytes
    assert hidden.seconds <= early.seconds * (1 + 5 * WORTH)


# ---- memory ----


def test_what_does_not_fit_is_passed_over_and_not_stopped_at() -> None:
    choices = [Choice(b, "resident", nbytes, saves=1.0) for b, nbytes in enumerate([10, 60, 30, 100, 20])]
    assert [choice.bucket for choice in _fill(choices, 65)] == [0, 2, 4]
    assert _fill(choices, 5) == []


def test_unshard_keeps_buckets_gathered_only_as_far_as_they_fit() -> None:
    base = wide_problem(mode="zero3")
    top = auto(base).best
    assert not any(bucket.sharded for bucket in top.layout.buckets), "with all the memory that there is"
    off = replace(base.options, passes={"unshard": False})
    bare = evaluate(base, base.layout("zero3"), "zero3")
    for part in (0.4, 0.8):
        budget = int(part * top.peak_bytes + (1 - part) * bare.peak_bytes)
        found = auto(replace(base, budget=budget)).best
        assert found.peak_bytes <= budget
        assert found.seconds <= auto(replace(base, budget=budget, options=off)).best.seconds


SETTINGS = [("auto", 1, True), ("zero3", 1, False)]


def smallest(found: Problem) -> int:
    with pytest.raises(TooLittle) as caught:
        auto(replace(found, budget=1))
    match = re.search(r"Give memory=(\d+) or more", str(caught.value))
    assert match, str(caught.value)
    return int(match[1])


@pytest.mark.parametrize(("mode", "accumulate", "clip"), SETTINGS)
def test_every_plan_fits_its_budget_down_to_the_smallest_that_an_error_names(
    mode: str, accumulate: int, clip: bool
) -> None:
    base = wide_problem(mode=mode, accumulate=accumulate, clip=clip, costs=synthetic(tier=DISK))
    top, floor = auto(base).best, smallest(base)
    slowest = 0.0
    for eighths in range(7, -1, -1):
        budget = floor + (top.peak_bytes - floor) * eighths // 7
        best = auto(replace(base, budget=budget)).best
        assert best.peak_bytes <= budget, f"{best.name} at {eighths} of 7"
        slowest = max(slowest, best.seconds)
    assert slowest >= top.seconds
    below = int(floor * 0.9)
    with pytest.raises(TooLittle, match=f"memory={below} bytes a rank is too little"):
        auto(replace(base, budget=below))


def test_offload_off_never_offloads() -> None:
    base = wide_problem(mode="zero1", offload="off")
    plain = auto(base).best
    with pytest.raises(TooLittle, match="too little"):
        auto(replace(base, budget=int(plain.peak_bytes * 0.6)))
    assert not plain.layout.offloaded


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_mixtures_of_modes_are_valid_programs(accumulate: int, clip: bool) -> None:
    base = problem(
        TiedGPT(), ids(torch.Generator().manual_seed(0)), accumulate=accumulate, clip=clip, bucket_bytes=2000
    )
    kinds = [
        Traits(scatter=False, reduce_often=False, sharded=False),
        Traits(scatter=True, reduce_often=False, sharded=False),
        Traits(scatter=True, reduce_often=True, sharded=False),
        Traits(scatter=True, reduce_often=True, sharded=True),
        Traits(scatter=True, reduce_often=False, sharded=True),
    ]
    plain = base.layout("zero3")
    for shift in range(3):
        traits = {b.index: kinds[(b.index + shift) % 5] for b in plain.buckets}
        found = evaluate(base, base.with_traits(plain, traits), "a mixture")
        assert {(b.scatter, b.reduce_often, b.sharded) for b in found.layout.buckets} == {
            (t.scatter, t.reduce_often, t.sharded) for t in kinds
        }
        for step in found.programs.values():
            assert check(step) == []


def test_room_is_what_the_budget_leaves() -> None:
    base = wide_problem(mode="zero3")
    layout = base.layout("zero3")
    big, small = (room_of(replace(base, budget=budget), layout) for budget in (20_000_000, 19_000_000))
    assert big is not None
    assert small is not None
    assert big - small == 1_000_000
    assert room_of(replace(base, budget=1), layout) == 0
    assert room_of(replace(base, thrifty=True), layout) is None


# ---- a whole plan: compile, files, cache ----


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """`world(n)`: plan for that many ranks from now on, with costs of no machine."""
    monkeypatch.setattr(
        planner, "agree_on_costs", lambda *a, collectives=None, **more: synthetic(dist.get_world_size(), 1.0, 1e-4)
    )

    def start(size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    start(2)
    yield start
    dist.destroy_process_group()


def small(width: int = 16, dropout: float = 0.0) -> nn.Module:
    inner = [m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, width), *inner, nn.Dropout(dropout))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def planned(cache: Path, batch: Any = None, model: nn.Module | None = None, optimizer: Any = None, **more: Any) -> Any:
    model = model or small()
    made = (optimizer or torch.optim.AdamW)(model.parameters())
    passes = {"shard": {"bucket_bytes": 1000}, **more.pop("passes", {})}
    step = weft.compile(model, made, squares, cache_dir=cache, passes=passes, **more)
    batch = torch.randn(4, 16) if batch is None else batch
    return step.prepare([batch] * more["accumulate"] if "accumulate" in more else batch)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "given_",
    [{}, {"mode": "zero3"}, {"mode": "zero1", "accumulate": 3, "clip_norm": 1.0}, {"mode": "zero3", "accumulate": 3}],
)
def test_planning_twice_decides_the_same_byte_for_byte(tmp_path: Path, given_: dict[str, Any]) -> None:
    texts = {planned(tmp_path / str(i), **given_).decisions.to_json() for i in range(2)}
    assert len(texts) == 1
    text = texts.pop()
    assert Decisions.from_json(text, "here").to_json() == text


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "zero3"])
def test_what_runs_is_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, accumulate: int, memory: str | None
) -> None:
    chosen = []
    monkeypatch.setattr(planner, "auto", lambda p: chosen.append(auto(p)) or chosen[-1])
    batch = {"accumulate": accumulate} if accumulate > 1 else {}
    found = planned(tmp_path, mode=mode, memory=memory, **batch)
    best = chosen[0].best
    assert best.programs.keys() == found.programs.keys()
    for variant, step in best.programs.items():
        order = [node.name for node in step.graph.nodes]
        assert [node.name for node in found.programs[variant].graph.nodes] == order, variant
    assert found.predicted.peak_bytes == best.peak_bytes
    assert found.predicted.seconds == best.seconds


@pytest.mark.usefixtures("world")
def test_a_plan_that_was_saved_is_the_plan_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(tmp_path / "a", mode="zero3", memory="1GiB")
    first.save(tmp_path / "plan.json")
    monkeypatch.setattr(planner, "auto", lambda p: pytest.fail("planned anew"))
    again = planned(tmp_path / "b", mode="zero3", memory="1GiB", plan=tmp_path / "plan.json")
    assert again.decisions.to_json() == first.decisions.to_json() == (tmp_path / "plan.json").read_text()
    assert again.code() == first.code()


def other(**given_: Any) -> dict[str, Any]:
    return given_


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other(mode="zero1"), "mode is zero1 here and zero3 in the plan"),
        (other(clip_norm=1.0), "clip_norm is 1.0 here and None in the plan"),
        (other(accumulate=2), "accumulate is 2 here and 1 in the plan"),
        (other(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), "optimizer is SGD here and AdamW in the plan"),
        (other(passes={"unshard": False}), "passes is .*unshard.* here and"),
        (other(model=small(24)), r"parameter .* is \[24\] torch.float32.* here and \[16\]"),
        (other(model=small(dropout=0.5)), r"graph is \w+ here and \w+ in the plan"),
        (other(batch=torch.zeros(3, 16)), r"graph is \w+ here and \w+ in the plan"),
        (other(precision=weft.Precision(compute=torch.bfloat16)), r"parameter .* compute torch.bfloat16"),
    ],
)
def test_a_plan_for_another_step_is_refused_with_what_differs(
    tmp_path: Path, world: Callable[[int], None], change: dict[str, Any], said: str
) -> None:
    planned(tmp_path, mode="zero3").save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=said):
        planned(tmp_path, **{"mode": "zero3", **change}, plan=tmp_path / "plan.json")


def test_a_plan_for_another_world_is_refused(tmp_path: Path, world: Callable[[int], None]) -> None:
    planned(tmp_path, mode="zero3").save(tmp_path / "plan.json")
    world(3)
    with pytest.raises(PlanError, match="world is 3 here and 2 in the plan"):
        planned(tmp_path, mode="zero3", plan=tmp_path / "plan.json")


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def edited(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return edited


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "truncated": (lambda text: text[: len(text) // 2], "is not a whole plan"),
    "empty": (lambda text: "", "is not a whole plan"),
    "not a plan": (lambda text: "[1, 2]", "holds format 'list', and this version of weft reads 1"),
    "of another format": (edit(lambda v: v.update(format=99)), "holds format 99"),
    "without layout": (edit(lambda v: v.pop("layout")), "is not a whole plan"),
    "identity of another type": (edit(lambda v: v.update(identity=5)), "is not a whole plan"),
    "layout of another type": (edit(lambda v: v.update(layout=[])), "is not a whole plan"),
    "policies of another type": (edit(lambda v: v.update(policies=[1])), "is not a whole plan"),
    "a policy with an unknown knob": (edit(lambda v: v["policies"].update(only={"speed": 3})), "is not a whole plan"),
    "a bucket left out": (
        edit(lambda v: v["layout"]["buckets"][0]["parameters"].append(v["layout"]["buckets"].pop()["parameters"][0])),
        "does not describe buckets|no bucket holds",
    ),
    "a parameter twice": (
        edit(lambda v: v["layout"]["buckets"][0]["parameters"].append(v["layout"]["buckets"][1]["parameters"][0])),
        "does not describe buckets of this model",
    ),
    "an unknown parameter": (
        edit(lambda v: v["layout"]["buckets"][0]["parameters"].append(999)),
        "does not describe buckets of this model",
    ),
    "a reduction left out": (edit(lambda v: v["layout"]["reduce_order"].pop()), "reduce_order is"),
    "a gather left out": (edit(lambda v: v["layout"]["gather_order"].pop(0)), "gather_order is"),
    "a bucket without traits": (edit(lambda v: v["layout"]["buckets"][0].pop("scatter")), "does not describe buckets"),
    "offloads what is not there": (edit(lambda v: v["layout"].update(offloaded=[77])), "offloaded is"),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_refused_and_a_damaged_kept_plan_is_made_anew(tmp_path: Path, damage: str) -> None:
    change, said = DAMAGE[damage]
    first = planned(tmp_path, mode="zero3")
    (tmp_path / "plan.json").write_text(change(first.decisions.to_json()))
    with pytest.raises(PlanError, match=said):
        planned(tmp_path, mode="zero3", plan=tmp_path / "plan.json")
    (kept,) = (tmp_path / "plans").iterdir()
    kept.write_text(change(kept.read_text()))
    with pytest.warns(UserWarning, match=said):
        again = planned(tmp_path, mode="zero3")
    assert again.decisions.to_json() == first.decisions.to_json() == kept.read_text(), "and kept anew"


@pytest.mark.usefixtures("world")
def test_a_plan_that_was_kept_is_found_and_nothing_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(tmp_path, mode="auto")
    calls: list[Problem] = []
    monkeypatch.setattr(planner, "auto", lambda p: calls.append(p) or auto(p))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(tmp_path, mode="auto").decisions.to_json() == first.decisions.to_json()
    assert not calls
    for change in (
        {"memory": 1 << 40},
        {"offload": "off"},
        {"clip_norm": 1.0},
        {"optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
        {"passes": {"prefetch": False}},
    ):
        calls.clear()
        planned(tmp_path, **{"mode": "auto", **change})
        assert len(calls) == 1, change


def test_a_plan_of_an_optimizer_that_keeps_less_is_not_used_for_one_that_keeps_more(
    tmp_path: Path, world: Callable[[int], None]
) -> None:
    plain = planned(tmp_path, mode="zero1", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    memory = plain.predicted.peak_bytes
    planned(tmp_path, mode="zero1", memory=memory, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    found = None
    with suppress(TooLittle):
        found = planned(
            tmp_path, mode="zero1", memory=memory, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
        )
    assert found is None or found.predicted.peak_bytes <= memory


@pytest.mark.usefixtures("world")
def test_too_little_memory_is_an_error_that_names_what_is_enough(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"memory=1000 bytes a rank is too little: .*Give memory=\d+") as caught:
        planned(tmp_path, memory=1000)
    enough = int(re.search(r"Give memory=(\d+)", str(caught.value))[1])  # type: ignore[index]
    found = planned(tmp_path, memory=enough)
    assert found.predicted.peak_bytes <= enough
    with pytest.raises(ValueError, match="too little"):
        planned(tmp_path, memory=enough // 2)


@pytest.mark.usefixtures("world")
def test_a_damaged_store_of_measurements_is_an_error_that_says_so(tmp_path: Path) -> None:
    from weft.measure.store import Store

    store = Store(tmp_path, CPU)
    assert store.path is not None
    store.path.write_text("{not json")
    with pytest.raises(StoreError, match="damaged"):
        planned(tmp_path)


def test_a_folder_that_cannot_be_written_is_said_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    step = weft.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum(), cache_dir="/proc/weft"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [step(torch.ones(2, 8)).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert len([w for w in caught if "cannot" in str(w.message)]) <= 1


@pytest.mark.usefixtures("world")
def test_a_folder_for_plans_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="the plan is not kept") as caught:
        assert planned(tmp_path).mode
    assert len([w for w in caught if "not kept" in str(w.message)]) == 1


# ---- switches ----


def positions(plan: Any) -> list[int]:
    """Compute nodes between each gather of this step and its wait."""
    found, gathers, compute = [], {}, 0
    for node in next(iter(plan.programs.values())).graph.nodes:
        if node.target is g.gather:
            gathers[g.bucket_of(node)] = compute
        elif node.target is g.await_gather and g.bucket_of(node) in gathers:
            found.append(compute - gathers.pop(g.bucket_of(node)))
        elif not g.is_step_node(node):
            compute += 1
    return found


@pytest.mark.usefixtures("world")
def test_switches_do_what_they_say(tmp_path: Path) -> None:
    off = planned(tmp_path, mode="zero3", passes={"prefetch": False})
    assert set(positions(off)) == {0}
    assert set(off.decisions.policies.values()) == {None}
    assert any(positions(planned(tmp_path, mode="zero3")))
    earliest = planned(tmp_path, mode="zero3", passes={"prefetch": {"rule": "earliest"}})
    assert sum(positions(earliest)) >= sum(positions(planned(tmp_path, mode="zero3")))

    kept = planned(tmp_path, mode="zero3", memory="1GiB", passes={"unshard": False})
    assert all(bucket.sharded for bucket in kept.layout.buckets)
    assert not all(bucket.sharded for bucket in planned(tmp_path, mode="zero3", memory="1GiB").layout.buckets)

    targets = {node.target for node in planned(tmp_path, passes={"stage_in_place": False}).programs["only"].graph.nodes}
    assert g.staged not in targets
    with pytest.raises(ValueError, match="too little"):
        planned(tmp_path, memory=planned(tmp_path, mode="zero3").predicted.peak_bytes // 2, passes={"offload": False})


@pytest.mark.usefixtures("world")
def test_explain_names_the_candidates_with_time_and_memory(tmp_path: Path) -> None:
    found = planned(tmp_path)
    text = found.explain()
    for name in ("replicate", "zero1"):
        assert re.search(rf"{name}: [\d.]+ ms a step, [\d.]+ [KMG]iB at its peak", text), text
    assert len(re.findall(r"^ *-> ", text, re.M)) == 1
    assert f"predicted step: {1e3 * found.predicted.seconds:.1f} ms" in text
    assert "predicted peak of a rank's memory" in text
    assert "no order of these ops and messages takes less than" in text
