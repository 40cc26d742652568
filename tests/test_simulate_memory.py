"""A step's memory as predicted: exact numbers where a small model's are known."""

from __future__ import annotations

import operator
import time
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.test_passes import context, lay_out, options, trace
from weft.graph import StepGraph, Variant, write_buffers
from weft.passes.lifetimes import placement
from weft.passes.pipeline import build_program
from weft.simulate.activations import activation_curve, returned_bytes
from weft.simulate.heap import heap_bytes
from weft.simulate.memory import ACTIVATIONS, ARENA, HEAP, STATE, SUMS, UPDATE, predict_memory, transient_curve
from weft.simulate.update import update_elements
from weft.state.layout import Layout

KB = 1024  # a tensor of 16 x 16


def step_of(build: Any) -> StepGraph:
    """A program made by hand: `build(graph, value)`, where `value(target, *args)` makes a node with its fake tensor."""
    graph = fx.Graph()

    def value(target: Any, *args: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=target.__name__.split(".")[0])
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    graph.placeholder("run")
    batch = graph.placeholder("batch")
    batch.meta["val"] = torch.zeros(16, 16)
    graph.output((build(value, batch),))
    return StepGraph(graph, {}, Layout("replicate", 1, (), (), (), {}), "only", 1, False, False)


def bytes_at(step: StepGraph) -> dict[str, int]:
    return dict(zip((node.name for node in step.graph.nodes), activation_curve(step).tolist(), strict=True))


def test_a_chain_holds_two_values_and_the_batch_is_not_ours() -> None:
    aten = torch.ops.aten

    def chain(value: Any, batch: fx.Node) -> fx.Node:
        node = batch
        for _ in range(3):
            node = value(aten.exp.default, node)
        return node

    step = step_of(chain)
    assert bytes_at(step) == {"run": 0, "batch": 0, "exp": KB, "exp_1": 2 * KB, "exp_2": 2 * KB, "output": KB}
    assert returned_bytes(step) == KB


def test_a_view_keeps_what_it_views_and_takes_nothing() -> None:
    aten = torch.ops.aten

    def views(value: Any, batch: fx.Node) -> fx.Node:
        whole = value(aten.exp.default, batch)
        column = value(aten.select.int, whole, 1, 0)
        small = value(aten.exp.default, column)
        value(aten.exp.default, batch)  # used by nothing: freed at once
        return value(aten.add.Tensor, column, small)

    step = step_of(views)
    vector = 64
    assert bytes_at(step) == {
        "run": 0,
        "batch": 0,
        "exp": KB,
        "select": KB,
        "exp_1": KB + vector,
        "exp_2": 2 * KB + vector,
        "add": KB + 2 * vector,
        "output": vector,
    }


def test_a_tuples_parts_are_freed_one_by_one() -> None:
    aten = torch.ops.aten

    def parts(value: Any, batch: fx.Node) -> fx.Node:
        both = value(aten.max.dim, batch, 1)  # 64 bytes of values, 128 of indices
        first = value(operator.getitem, both, 0)
        return value(aten.exp.default, first)

    found = bytes_at(step_of(parts))
    assert (found["max_1"], found["getitem"], found["exp"], found["output"]) == (192, 192, 128, 64)


def test_the_code_that_runs_drops_values_after_their_last_use() -> None:
    step = program(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.zeros(2, 4), "zero3", 1)[0]
    lines = fx.GraphModule(nn.Module(), step.graph).code.splitlines()
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    position = {node: index for index, node in enumerate(step.graph.nodes)}
    assert any(node.target is write_buffers for node in nodes)
    for node in nodes:
        if node.users and all(user.op != "output" for user in node.users):
            last = max(node.users, key=lambda user: position[user])
            line = next(line for line in lines if line.strip().startswith(f"{last.name} = "))
            assert f"{node.name} = " in line, (node, line)


def program(
    model: nn.Module, batch: Any, mode: str, world: int, variant: Variant = "only", accumulate: int = 1
) -> tuple[StepGraph, Layout]:
    traced = trace(model, batch, lambda m, x: m(x).square().mean())
    layout = lay_out(model, traced, mode, world, bucket_bytes=64 * KB)
    return build_program(
        traced, layout, options(accumulate), variant, whole_update=False, context=context(world)
    ), layout


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(6))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_checkpointing_lowers_the_peak(mode: str) -> None:
    batch = torch.zeros(256, 64)
    plain, recomputed = (
        int(activation_curve(program(Blocks(on), batch, mode, 2)[0]).max()) / batch.nbytes for on in (False, True)
    )
    assert 11 < plain < 16  # two kept values a block, and those in use
    assert recomputed < 10


def test_gradients_that_are_staged_and_parameters_are_not_activations() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    step, _ = program(model, torch.zeros(2, 256), "zero3", 2)
    assert activation_curve(step).max() < model[0].weight.nbytes / 8


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "zero3"])
def test_the_parts_of_a_prediction_add_up(mode: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    x = torch.zeros(2, 256)
    variants: tuple[Variant, ...] = ("first", "middle", "last")
    built = [program(model, x, mode, 2, variant, accumulate=3) for variant in variants]
    programs, layout = [step for step, _ in built], built[0][1]
    curve = predict_memory(
        programs, layout, state_elements=2, update_elements=1, accumulate=3, receives=True, cpu=False
    )
    weights = 2 * model[0].weight.nbytes
    slices = weights // 2 if mode in ("zero2", "zero3") else weights
    assert curve.parts[SUMS] == slices
    assert curve.parts[STATE] == {"replicate": 3 * weights, "zero3": 3 * weights // 2}.get(mode, 2 * weights)
    assert curve.parts[ARENA] == max(placement(step, receives=True).nbytes for step in programs)
    assert curve.parts[HEAP] == 0
    assert sum(curve.parts.values()) == curve.peak_bytes == curve.nbytes.max()
    assert curve.by_part[UPDATE].max() == (weights // 2 if mode == "replicate" else weights // 4)
    # A gradient that is added to a sum is a value first; one that is reduced at once is written where it is reduced.
    assert curve.parts[ACTIVATIONS] < (0.1 if mode in ("zero2", "zero3") else 0.6) * weights
    for step in programs:
        assert transient_curve(step, receives=True).max() <= placement(step, receives=True).nbytes


@pytest.mark.parametrize(
    ("kind", "settings", "fused", "elements"),
    [
        (torch.optim.AdamW, {}, True, 0),
        (torch.optim.AdamW, {"foreach": False}, False, 2),
        (torch.optim.SGD, {}, False, 0),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, False, 1),
    ],
)
def test_temporaries_of_an_update_are_found_by_trial(
    kind: Any, settings: dict[str, Any], fused: bool, elements: int
) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1, **settings)
    assert update_elements(optimizer, fused, torch.device("cpu")) == elements


def test_the_heap_takes_more_than_its_values() -> None:
    size = 1 << 20
    assert heap_bytes([(size, 0, 0), (size // 2, 1, 1)], 2) < 1.001 * size  # the first one's place
    same_size_again = [(size, 0, 1), (size, 0, 3), (size, 2, 3)]
    assert heap_bytes(same_size_again, 4) > 2.9 * size  # the hole is as large as the value, and so too small
    assert heap_bytes([], 0) == 0


def test_a_long_program_takes_little_time() -> None:
    def long(value: Any, batch: fx.Node) -> fx.Node:
        node = batch
        for _ in range(13_000):
            node = value(torch.ops.aten.exp.default, node)
        return node

    step = step_of(long)
    start = time.process_time()
    predict_memory([step], step.layout, state_elements=2, update_elements=0, accumulate=1, receives=False)
    assert time.process_time() - start < 2


def test_open_sizes_count_as_what_they_are_in_the_batch_at_hand() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    peaks = []
    for size in (128, 256, 512):  # from the second on, the size is left open
        step.prepare(torch.zeros(size, 64))
        peaks.append(int(activation_curve(step.plan.programs["only"]).max()))
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.1)
    assert peaks[2] == peaks[1], "one program serves both, and was planned for the smaller"
