"""Programs of random models, modes and worlds keep the rules; programs broken on purpose are caught."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tests.models import CASES, batches, build
from weft import graph as g
from weft.graph import StepGraph, Variant
from weft.options import check_options
from weft.passes.context import PlanContext
from weft.passes.lifetimes import leases, placement
from weft.passes.pipeline import build_program
from weft.passes.shard import gather_order, next_order
from weft.passes.validate import InvalidProgram, check, validate
from weft.predict.costs import Costs, UpdateTimes
from weft.predict.links import default_links
from weft.state.layout import Layout, ParameterInfo, make_layout
from weft.trace.capture import ParameterSpec, Trace, capture, default_loss
from weft.trace.signature import split_batch

MODES = ("replicate", "zero1", "zero2", "zero3")
CPU = torch.device("cpu")


def options(accumulate: int = 1, clip: bool = False, **passes: Any) -> Any:
    return check_options(
        mode="auto",
        memory=None,
        accumulate=accumulate,
        clip_norm=1.0 if clip else None,
        precision=None,
        fuse="auto",
        offload="auto",
        passes=passes,
        seed=None,
        cache_dir=None,
        mesh=None,
        timeout=60,
        debug=False,
    )


def trace(model: nn.Module, batch: Any, loss: Any = None, backward: bool = True) -> Trace:
    tensors, spec = split_batch(batch)
    specs = [
        ParameterSpec(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    ]
    return capture(model, loss or default_loss, tensors, spec, specs, device=CPU, backward=backward)


def lay_out(model: nn.Module, traced: Trace, mode: str, world: int, bucket_bytes: int = 2000) -> Layout:
    infos = [
        ParameterInfo(
            index=i,
            name=name,
            shape=tuple(p.shape),
            stride=p.stride(),
            numel=p.numel(),
            dtype=p.dtype,
            group=0 if p.requires_grad else None,
            compute=p.dtype,
            reduce=p.dtype,
            master=p.dtype,
        )
        for i, (name, p) in enumerate(model.named_parameters())
    ]
    layout = make_layout(infos, traced, mode=mode, world=world, bucket_bytes=bucket_bytes)
    layout = layout.with_next_order(next_order(traced, layout))
    return layout.with_gather_order(gather_order(traced, layout))


def context(world: int, **more: Any) -> PlanContext:
    """Times as of a machine that does a microsecond's work an op, on links of 1 Gbit/s."""
    costs = Costs(lambda node: 1e-6, default_links(world, gbit=1.0), UpdateTimes(1e-5, 1e-9), 1e10)
    return PlanContext(costs if world > 1 else None, receives=True, **more)


def program(
    name: str = "tied_gpt",
    mode: str = "zero3",
    world: int = 2,
    *,
    variant: Variant = "only",
    accumulate: int = 1,
    clip: bool = False,
    **passes: Any,
) -> StepGraph:
    model = build(name)
    traced = trace(model, batches(name, 0, 0, 1)[0], CASES[name].loss)
    layout = lay_out(model, traced, mode, world)
    return build_program(
        traced, layout, options(accumulate, clip, **passes), variant, whole_update=False, context=context(layout.world)
    )


# ---- random models ----


class RandomModel(nn.Module):
    """A chain of layers with sizes, reuse, freezing and side branches drawn by hypothesis."""

    def __init__(self, widths: list[int], reuse: list[int], frozen: list[bool], unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        for layer, freeze in zip(self.layers, frozen, strict=False):
            layer.requires_grad_(not freeze)
        self.gain = nn.Parameter(torch.ones(1))
        self.reuse = reuse
        self.unused = nn.Linear(3, 3) if unused else None
        self.square = nn.Linear(widths[-1], widths[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.gain
        for times in self.reuse:
            for _ in range(times):
                x = x + self.square(x) * (1 + self.gain)
        return x.square().mean()


@st.composite
def random_models(draw: Any) -> nn.Module:
    widths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    return RandomModel(
        widths,
        draw(st.lists(st.integers(1, 2), max_size=2)),
        draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths))),
        draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    model=random_models(),
    mode=st.sampled_from(MODES),
    world=st.integers(1, 5),
    bucket_bytes=st.sampled_from([1, 500, 4000, 10**6]),
    accumulate=st.sampled_from([1, 3]),
    clip=st.booleans(),
    prefetch=st.booleans(),
    stage_in_place=st.booleans(),
)
def test_programs_of_random_models_keep_every_rule(
    model: nn.Module,
    mode: str,
    world: int,
    bucket_bytes: int,
    accumulate: int,
    clip: bool,
    prefetch: bool,
    stage_in_place: bool,
) -> None:
    x = torch.randn(2, model.layers[0].in_features)  # type: ignore[union-attr,operator,arg-type]
    traced = trace(model, x)
    layout = lay_out(model, traced, mode, world, bucket_bytes)
    check_layout(layout, model)
    variants: tuple[Variant, ...] = ("only",) if accumulate == 1 else ("first", "middle", "last")
    chosen = options(accumulate, clip, prefetch=prefetch, stage_in_place=stage_in_place)
    for variant in variants:
        step = build_program(traced, layout, chosen, variant, whole_update=False, context=context(layout.world))
        assert check(step) == []
        check_no_overlap(step)
    evaluation = trace(model, x, backward=False)
    step = build_program(evaluation, layout, chosen, "evaluate", whole_update=False, context=context(world))
    assert check(step) == []
    check_no_overlap(step)


def check_layout(layout: Layout, model: nn.Module) -> None:
    """Every trained parameter has one place; places are aligned and do not overlap; slices are equal and aligned."""
    trained = {i for i, p in enumerate(model.parameters()) if p.requires_grad}
    assert trained <= set(layout.slot_of)
    for bucket in layout.buckets:
        alignment = 64 // bucket.compute.itemsize
        assert bucket.numel % layout.world == 0
        assert bucket.slice_numel % alignment == 0
        end = 0
        for slot in bucket.slots:
            assert slot.offset % alignment == 0
            assert slot.offset >= end
            end = slot.end
        assert end <= bucket.numel
        assert len({parameter_requires_grad(model, slot.parameter) for slot in bucket.slots}) == 1


def parameter_requires_grad(model: nn.Module, index: int) -> bool:
    return list(model.parameters())[index].requires_grad


def check_no_overlap(step: StepGraph) -> None:
    """No two buffers that are in use at one node share a byte of the arena."""
    placed = placement(step, receives=True)
    found = leases(step, receives=True)
    for i, one in enumerate(found):
        for other in found[:i]:
            if one.overlaps(other):
                a, b = placed.offsets[one.key], placed.offsets[other.key]
                assert a + one.nbytes <= b or b + other.nbytes <= a, (one, other)


# ---- broken on purpose ----


def nodes(step: StepGraph, target: Any) -> list[fx.Node]:
    return [node for node in step.graph.nodes if node.target is target]


def move_before(node: fx.Node, target: fx.Node) -> None:
    target.prepend(node)


def erase(step: StepGraph, node: fx.Node) -> None:
    assert not node.users
    step.graph.erase_node(node)


def remove_reduction_wait(step: StepGraph) -> None:
    erase(step, nodes(step, g.await_reduce)[0])


def remove_gather_wait(step: StepGraph) -> None:
    wait = nodes(step, g.await_gather)[1]
    wait.replace_all_uses_with(nodes(step, g.gather)[1])
    erase(step, wait)


def release_early(step: StepGraph) -> None:
    release = nodes(step, g.release)[0]
    wait = next(n for n in nodes(step, g.await_gather) if g.bucket_of(n) == g.bucket_of(release))
    wait.append(release)


def forget_release(step: StepGraph) -> None:
    erase(step, nodes(step, g.release)[0])


def swap_gathers(step: StepGraph) -> None:
    first, second = nodes(step, g.gather)[:2]
    move_before(second, first)


def swap_reductions(step: StepGraph) -> None:
    first, second = nodes(step, g.reduce)[:2]
    second.append(first)


def gather_twice(step: StepGraph) -> None:
    gather = nodes(step, g.gather)[0]
    with step.graph.inserting_after(gather):
        step.graph.call_function(g.gather, gather.args)


def reduce_before_staging(step: StepGraph) -> None:
    reduce = nodes(step, g.reduce)[-1]
    stage = next(n for n in nodes(step, g.stage) if g.bucket_of(n) == g.bucket_of(reduce))
    move_before(reduce, stage)


def update_before_reduction(step: StepGraph) -> None:
    update = nodes(step, g.update)[-1]
    wait = next(n for n in nodes(step, g.await_reduce) if g.bucket_of(n) == g.bucket_of(update))
    move_before(update, wait)


def update_before_norm(step: StepGraph) -> None:
    move_before(nodes(step, g.update)[0], nodes(step, g.await_norm)[0])


def ask_before_telling(step: StepGraph) -> None:
    move_before(nodes(step, g.await_reach)[0], nodes(step, g.announce)[0])


def norm_before_reductions(step: StepGraph) -> None:
    move_before(nodes(step, g.norm)[0], nodes(step, g.await_reduce)[-1])


def update_before_last_use(step: StepGraph) -> None:
    """The first bucket's update moves to right behind its reduction's start, before backward is through with it."""
    update = nodes(step, g.update)[-1]
    use = next(
        user
        for wait in (*nodes(step, g.await_gather), *nodes(step, g.parameters))
        if g.bucket_of(wait) == g.bucket_of(update)
        for item in wait.users
        for user in item.users
    )
    move_before(update, use)


def forget_update(step: StepGraph) -> None:
    erase(step, nodes(step, g.update)[0])


def update_twice(step: StepGraph) -> None:
    update = nodes(step, g.update)[0]
    with step.graph.inserting_after(update):
        step.graph.call_function(g.update, update.args)


def gather_before_update(step: StepGraph) -> None:
    update = nodes(step, g.update)[0]
    gather = next(n for n in nodes(step, g.gather) if g.bucket_of(n) == g.bucket_of(update))
    move_before(gather, update)


def forget_next_gather(step: StepGraph) -> None:
    erase(step, nodes(step, g.gather)[-1])


def draw_out_of_order(step: StepGraph) -> None:
    draws = [n for n in step.graph.nodes if "random_key" in n.meta]
    first, second = draws[0], draws[1]
    keys = first.meta["random_key"], second.meta["random_key"]
    first.meta["random_key"], second.meta["random_key"] = keys[1], keys[0]


def write_in_place(step: StepGraph) -> None:
    node = next(n for n in step.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    node.target = torch.ops.aten.add_.Tensor


def read_gather_without_wait(step: StepGraph) -> None:
    item = next(n for n in step.graph.nodes if n.target is operator.getitem and n.args[0].target is g.await_gather)
    item.update_arg(0, nodes(step, g.gather)[0])


BROKEN: list[tuple[Callable[[StepGraph], None], str, bool]] = [
    (remove_reduction_wait, "zero3", False),
    (remove_reduction_wait, "replicate", False),
    (remove_gather_wait, "zero3", False),
    (read_gather_without_wait, "zero3", False),
    (release_early, "zero3", False),
    (forget_release, "zero3", False),
    (swap_gathers, "zero3", False),
    (swap_reductions, "zero1", False),
    (swap_reductions, "replicate", False),
    (gather_twice, "zero3", False),
    (reduce_before_staging, "zero2", False),
    (update_before_reduction, "replicate", False),
    (update_before_norm, "zero3", True),
    (update_before_norm, "replicate", True),
    (ask_before_telling, "zero2", False),
    (norm_before_reductions, "zero1", True),
    (update_before_last_use, "zero1", False),
    (update_before_last_use, "replicate", False),
    (forget_update, "zero3", False),
    (update_twice, "replicate", False),
    (gather_before_update, "zero1", False),
    (forget_next_gather, "zero2", False),
    (draw_out_of_order, "zero3", False),
    (write_in_place, "replicate", False),
]


@pytest.mark.parametrize(("damage", "mode", "clip"), BROKEN, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_program_broken_on_purpose_is_caught(damage: Callable[[StepGraph], None], mode: str, clip: bool) -> None:
    step = program(mode=mode, clip=clip, stage_in_place=False)
    assert check(step) == []
    damage(step)
    assert check(step), "the validator saw nothing"
    with pytest.raises(InvalidProgram, match="breaks its rules"):
        validate(step)


# ---- single passes ----


def test_prefetch_starts_a_gather_before_the_wait_in_front_of_it() -> None:
    ahead, just_in_time = program(prefetch=True), program(prefetch=False)

    def in_flight_at_waits(step: StepGraph) -> list[int]:
        flying, counts = 0, []
        for node in step.graph.nodes:
            flying += (node.target is g.gather) - (node.target is g.await_gather)
            if node.target is g.await_gather:
                counts.append(flying)
        return counts

    assert set(in_flight_at_waits(just_in_time)) == {0}
    assert sum(in_flight_at_waits(ahead)) >= len(in_flight_at_waits(ahead)) // 2


def test_gradients_of_weights_are_written_where_they_are_reduced() -> None:
    step = program(stage_in_place=True)
    assert len(nodes(step, g.staged)) >= 8, "the linear layers' weights"
    assert len(nodes(step, g.staged)) + len(nodes(step, g.stage)) == len(nodes(program(stage_in_place=False), g.stage))


class Scaled(nn.Module):
    """A weight that forward and backward use as `1 + w`, with other layers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(torch.tanh(first(x)) * (1 + self.scale))).square().mean()


def test_values_derived_from_parameters_are_computed_again_in_backward() -> None:
    model = Scaled()
    traced = trace(model, torch.randn(2, 8))
    layout = lay_out(model, traced, "zero3", 2, bucket_bytes=1)
    step = build_program(traced, layout, options(), "only", whole_update=False, context=context(2))
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    scale = [n for n in step.graph.nodes if n.meta.get("parameter") == "scale"]
    assert len(scale) == 2, "one value a gather"
    sums = [[user for user in value.users if user.target is torch.ops.aten.add.Tensor] for value in scale]
    assert [len(found) for found in sums] == [1, 1], "each phase computes its own"
    again = order[scale[1].args[0]]  # type: ignore[index]
    assert all(order[reader] < again for reader in sums[0][0].users), "forward's is not read by backward"


def test_the_same_trace_gives_the_same_program() -> None:
    one, two = program(), program()
    assert one.graph.python_code("self").src == two.graph.python_code("self").src


def test_zero3_holds_few_buckets_at_a_time() -> None:
    step = program(accumulate=1)
    gathered = [lease for lease in leases(step, receives=True) if lease.key[0] in ("gathered", "regathered")]
    peak = max(
        sum(lease.nbytes for lease in gathered if lease.start <= at <= lease.stop)
        for at in range(len(step.graph.nodes))
    )
    parameters = sum(bucket.bytes(bucket.compute) for bucket in step.layout.buckets)
    assert peak < 0.6 * parameters
