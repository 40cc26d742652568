"""One plan on all ranks: mixtures train as eager does, passes keep bits, and what goes wrong goes wrong everywhere."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.models import CASES, batches, build
from tests.ranks import Ranks
from tests.reference import SEED, train_compiled, train_eagerly, worst_error
from weft.passes.candidate import evaluate
from weft.plans import planner
from weft.state.layout import Traits

pytestmark = pytest.mark.distributed
Start = Callable[[int], Ranks]
CLIP = 0.05
KINDS = [
    Traits(scatter=False, reduce_often=False, sharded=False),
    Traits(scatter=True, reduce_often=False, sharded=False),
    Traits(scatter=True, reduce_often=True, sharded=False),
    Traits(scatter=True, reduce_often=True, sharded=True),
    Traits(scatter=True, reduce_often=False, sharded=True),
]


def compiled(name: str = "tied_gpt", **given: Any) -> tuple[nn.Module, weft.Step]:
    model = build(name)
    passes = {"shard": {"bucket_bytes": 2000}, **given.pop("passes", {})}
    given = {"seed": SEED, "timeout": 30, **given}
    return model, weft.compile(model, CASES[name].optimizer(model), CASES[name].loss, passes=passes, **given)


def values(model: nn.Module, step: weft.Step) -> list[torch.Tensor]:
    with step.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- mixtures ----


def train_a_mixture(rank: int, world: int, name: str, shift: int) -> dict[str, tuple[float, str]]:
    """Every kind of bucket in one layout."""
    real = planner.auto

    def mixed(problem: Any) -> Any:
        plain = problem.layout("zero3")
        traits = {b.index: KINDS[(b.index + shift) % len(KINDS)] for b in plain.buckets if b.trained and not b.dormant}
        best = evaluate(problem, problem.with_traits(plain, traits), "a mixture")
        kinds = {(b.scatter, b.reduce_often, b.sharded) for b in best.layout.buckets}
        assert len(kinds) >= 2, "few buckets: nothing is mixed"
        return replace(real(problem), best=best, others=())

    found = {}
    planner.auto = mixed  # type: ignore[assignment]
    try:
        for accumulate, clip in ((1, None), (3, CLIP)):
            expected = train_eagerly(name, world=world, accumulate=accumulate, clip=clip, steps=4)
            fresh = {"replan": False, "unshard": bool(shift)}  # a plan of its own in the cache
            result = train_compiled(
                name,
                "auto",
                rank=rank,
                accumulate=accumulate,
                clip=clip,
                steps=4,
                passes=fresh,
                bucket_bytes=199 if name == "partly_used" else 1999,
            )
            found[f"accumulate {accumulate}, clip {clip}"] = worst_error(result, expected, rank)
    finally:
        planner.auto = real
    return found


@pytest.mark.parametrize(
    ("world", "name", "shift"), [(2, "tied_gpt", 0), (2, "partly_used", 1), (3, "checkpointed_gpt", 1)]
)
def test_a_mixture_of_all_kinds_of_buckets_trains_as_eager_does(
    ranks: Start, world: int, name: str, shift: int
) -> None:
    for answer in ranks(world).run(train_a_mixture, world, name, shift):
        for setting, (error, where) in answer.items():
            assert error < 1e-12, (setting, where, error)


# ---- bits ----


def train_by_passes(rank: int, mode: str, variants: list[tuple[dict[str, Any], Any]], accumulate: int) -> list[Any]:
    found = []
    for passes, memory in variants:
        model, step = compiled(
            "checkpointed_gpt", mode=mode, memory=memory, accumulate=accumulate, clip_norm=CLIP, passes=passes
        )
        losses = []
        for index in range(3):
            data = batches("checkpointed_gpt", rank, index, accumulate)
            losses.append(step(data if accumulate > 1 else data[0]).item())
        resident = sum(not b.sharded for b in step.plan.layout.buckets)
        found.append((losses, values(model, step), resident))
    return found


PREFETCH: list[tuple[dict[str, Any], Any]] = [
    ({"prefetch": False}, None),
    ({}, None),
    ({"prefetch": {"rule": "earliest"}}, None),
]


@pytest.mark.parametrize(
    ("world", "mode", "accumulate"), [(2, "zero1", 2), (2, "zero3", 2), (2, "zero3", 1), (3, "zero3", 1)]
)
def test_prefetch_and_unshard_leave_every_bit_as_it_was(ranks: Start, world: int, mode: str, accumulate: int) -> None:
    # Where steps accumulate, what is reduced once a step instead of in every micro-step is summed in another order.
    more = [({}, "1GiB")] if mode == "zero3" and accumulate == 1 else []
    for answers in ranks(world).run(train_by_passes, mode, PREFETCH + more, accumulate):
        losses, parameters, resident = answers[0]
        for other_losses, other, _ in answers[1:]:
            assert losses == other_losses
            assert equal(parameters, other)
        if more:
            assert answers[3][2] > resident, "nothing stayed gathered, so the test tests nothing"


# ---- files ----


def save_and_use(rank: int, folder: str) -> tuple[str, str, bool]:
    runs = []
    for plan in (None, Path(folder) / "plan.json"):
        model, step = compiled(mode="zero3", memory="1GiB", plan=plan, passes={"replan": False})
        losses = [step(batches("tied_gpt", rank, index, 1)[0]).item() for index in range(3)]
        if plan is None and rank == 0:
            step.plan.save(Path(folder) / "plan.json")
        runs.append((step.plan.decisions.to_json(), losses, values(model, step)))
        torch.distributed.barrier()
    (one, losses, parameters), (two, other_losses, other) = runs
    return one, two, losses == other_losses and equal(parameters, other)


def test_a_saved_plan_gives_the_same_plan_and_bits_on_all_ranks(ranks: Start, tmp_path: Path) -> None:
    answers = ranks(2).run(save_and_use, str(tmp_path))
    assert len({text for one, two, _ in answers for text in (one, two)}) == 1
    assert all(same for *_, same in answers)


def error_of(action: Callable[[], Any]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "no error", "", time.monotonic() - began


def disagree(rank: int, folder: str, what: str) -> tuple[str, str, float]:
    given: dict[str, Any] = {"mode": "zero3"}
    if what == "plan files":
        path = Path(folder) / f"{rank}.json"
        _, step = compiled(**given)
        step.prepare(batches("tied_gpt", rank, 0, 1)[0])
        step.plan.save(path)
        if rank == 1:
            value = json.loads(path.read_text())
            value["why"].append("another reason")
            path.write_text(json.dumps(value))
        given["plan"] = path
    elif what == "one plan file":
        path = Path(folder) / f"{rank}.json"
        path.write_text("{}")
        given |= {"plan": path} if rank == 1 else {}
    elif what == "mode":
        given["mode"] = ("zero3", "zero1")[rank]
    elif what == "passes":
        given["passes"] = ({}, {"prefetch": False})[rank]
    elif what == "offload":
        given |= {"offload": ("auto", "off")[rank]}
    elif what == "a broken plan file":
        path = Path(folder) / "both.json"
        path.write_text("{")
        given["plan"] = path
    elif what == "too little":
        given |= {"memory": 1000, "mode": "auto"}
    elif what == "a defect on rank 0" and rank == 0:
        given["passes"] = {"shard": {"bucket_bytes": 2000}}
        real = planner.Planner._decisions

        def fail(*_: Any) -> Any:
            planner.Planner._decisions = real  # type: ignore[method-assign]
            raise KeyError("something that nobody thought of")

        planner.Planner._decisions = fail  # type: ignore[method-assign]
    return error_of(lambda: compiled(**given)[1](batches("tied_gpt", rank, 0, 1)[0]))


@pytest.mark.parametrize(
    ("what", "kinds", "said"),
    [
        ("plan files", ("ValueError", "ValueError"), "compile different steps: plan a file with the hash"),
        ("one plan file", ("ValueError", "ValueError"), "plan none on rank 0, plan a file"),
        ("mode", ("ValueError", "ValueError"), "mode zero3 on rank 0, mode zero1 on rank 1"),
        ("passes", ("ValueError", "ValueError"), "compile different steps: passes"),
        ("offload", ("ValueError", "ValueError"), "offload allowed on rank 0, offload off on rank 1"),
        ("a broken plan file", ("PlanError", "PlanError"), "is not a whole plan"),
        ("too little", ("TooLittle", "TooLittle"), "is too little"),
        ("a defect on rank 0", ("KeyError", "RuntimeError"), "something that nobody thought of"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    ranks: Start, tmp_path: Path, what: str, kinds: tuple[str, str], said: str
) -> None:
    answers = ranks(2).run(disagree, str(tmp_path), what)
    for (found, message, seconds), kind in zip(answers, kinds, strict=True):
        assert found == kind, message
        assert said in message
        assert seconds < 25


# ---- a rank that dies ----


def die_while_measuring(rank: int) -> tuple[str, str, float]:
    from weft.measure import agree

    if rank == 1:
        agree._update_times = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    found = error_of(lambda: compiled(mode="zero1", timeout=10)[1].prepare(batches("tied_gpt", rank, 0, 1)[0]))
    raise AssertionError(f"{found[0]} after {found[2]:.1f} s")  # what reaches the test, the other rank being dead


def test_a_rank_that_dies_while_others_plan_is_a_peer_error_on_them() -> None:
    pool = Ranks(2)
    began = time.monotonic()
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(die_while_measuring, timeout=60)
    finally:
        pool.kill()
    assert time.monotonic() - began < 60
    assert "PeerError after" in str(caught.value) or "ranks [1] died" in str(caught.value)


# ---- the plan against what happens ----


def train_with_wrong_costs(rank: int, mode: str, folder: str, replan: bool) -> Any:
    """Twice as fast as the machine is."""
    real = planner.agree_on_costs

    def wrong(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        return replace(found.scaled(0.02), source="wrong").with_links(found.links.scaled(0.02))

    planner.agree_on_costs = wrong
    os.environ["WEFT_MEASURE"] = "1"
    try:
        model, step = compiled(mode=mode, cache_dir=Path(folder) / str(replan), passes={"replan": replan})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, policies = [], []
            for index in range(24):
                losses.append(step(batches("tied_gpt", rank, index, 1)[0]).item())
                policies.append(json.dumps(json.loads(step.plan.decisions.to_json())["layout"]))
        said = [str(w.message) for w in caught if "were predicted" in str(w.message)]
        return said, losses, values(model, step), step.plan.predicted.seconds, len(set(policies))
    finally:
        planner.agree_on_costs = real
        os.environ["WEFT_MEASURE"] = "0"


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_a_wrong_prediction_is_said_once_and_planned_anew_with_the_same_bits(
    ranks: Start, tmp_path: Path, mode: str
) -> None:
    anew = ranks(2).run(train_with_wrong_costs, mode, str(tmp_path), True)
    kept = ranks(2).run(train_with_wrong_costs, mode, str(tmp_path), False)
    assert [len(said) for said, *_ in anew] == [1, 0], "rank 0 says it, once"
    assert all(not said for said, *_ in kept)
    assert anew[0][3] == anew[1][3]
    assert anew[0][3] != kept[0][3], "planned from what was measured"
    for (_, losses, parameters, _, _), (_, other_losses, other, _, _) in zip(anew, kept, strict=True):
        assert losses == other_losses
        assert equal(parameters, other)


# ---- in between ----


def in_between(rank: int, mode: str, disturbed: bool) -> tuple[list[float], list[torch.Tensor], int]:
    model, step = compiled(mode=mode, debug=True, memory="1GiB")
    losses, flying = [], 0
    for index in range(4):
        losses.append(step(batches("tied_gpt", rank, index, 1)[0]).item())
        assert step._executor is not None
        flying += len(step._executor.gathers)
        if disturbed:
            other = batches("tied_gpt", rank, 90, 1)[0]
            step.evaluate(other[:, : 4 + rank] if index == 1 else other)  # other shapes on one rank
            with step.gathered():
                pass
    return losses, values(model, step), flying


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_evaluating_and_gathering_between_steps_change_no_bit(ranks: Start, mode: str) -> None:
    plain = ranks(2).run(in_between, mode, False)
    for (losses, parameters, flying), (other_losses, other, _) in zip(
        plain, ranks(2).run(in_between, mode, True), strict=True
    ):
        assert flying, "nothing was in flight, so the test tests nothing"
        assert losses == other_losses
        assert equal(parameters, other)


def other_shapes(rank: int, mode: str, prefetch: bool) -> tuple[list[float], list[torch.Tensor]]:
    model, step = compiled(mode=mode, debug=True, passes={"prefetch": prefetch})
    losses = []
    for index in range(4):
        batch = batches("tied_gpt", rank, index, 1)[0]
        losses.append(step(batch[:, : 3 + index] if rank == 1 and index else batch).item())
    return losses, values(model, step)


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_other_shapes_on_one_rank_run_the_same_sequence_and_bits(ranks: Start, mode: str) -> None:
    on, off = (ranks(2).run(other_shapes, mode, prefetch) for prefetch in (True, False))
    for (losses, parameters), (other_losses, other) in zip(on, off, strict=True):
        assert losses == other_losses
        assert equal(parameters, other)
