"""Planning of offloaded optimizer state: options, layout, the pass that overlaps the copies, and the rules it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import weft
from tests.models import batches, build
from tests.test_passes import context, lay_out, options, trace
from weft import graph as g
from weft.graph import StepGraph, Variant, bucket_of
from weft.passes.pipeline import build_program
from weft.passes.validate import check


def program(variant: Variant = "only", accumulate: int = 1, clip: bool = False, **configured: Any) -> StepGraph:
    model = build("tied_gpt")
    traced = trace(model, batches("tied_gpt", 0, 0, 1)[0])
    layout = lay_out(model, traced, "zero1", 2)
    layout = layout.with_offload([b.index for b in layout.buckets if b.index % 3], configured.pop("window", 2))
    chosen = options(accumulate, clip, offload=configured)
    return build_program(traced, layout, chosen, variant, whole_update=False, context=context(2))


def moves(step: StepGraph) -> list[tuple[str, int]]:
    """Reloads, updates and offloads of the offloaded buckets, in order."""
    kinds = (g.reload, g.await_reload, g.update, g.offload)
    return [
        (node.name.rpartition("_")[0], bucket_of(node))
        for node in step.step_nodes()
        if node.target in kinds and bucket_of(node) in step.layout.offloaded
    ]


def test_the_base_schedule_brings_one_fragment_at_a_time() -> None:
    found = moves(program(overlap=False))
    assert len(found) >= 16
    for start in range(0, len(found), 4):
        bucket = found[start][1]
        assert found[start : start + 4] == [(k, bucket) for k in ("reload", "await_reload", "update", "offload")]


@pytest.mark.parametrize("window", [1, 2, 3, 50])
@pytest.mark.parametrize("clip", [False, True])
def test_reloads_start_as_soon_as_there_is_memory(window: int, clip: bool) -> None:
    step = program(window=window, clip=clip)
    nodes = list(step.graph.nodes)
    reloads = [node for node in nodes if node.target is g.reload]
    offloads = [node for node in nodes if node.target is g.offload]
    announce = next(index for index, node in enumerate(nodes) if node.target is g.announce)
    assert nodes[announce + 1 : announce + 1 + window][: len(reloads)] == reloads[:window]
    for reload, before in zip(reloads[window:], offloads, strict=False):
        assert before.next is reload
    assert [bucket_of(node) for node in reloads] == [bucket_of(node) for node in offloads]


@pytest.mark.parametrize("variant", ["first", "middle", "evaluate"])
def test_programs_that_update_nothing_move_nothing(variant: Variant) -> None:
    assert not moves(program(variant, accumulate=3))


def without(target: Callable[..., Any]) -> Callable[[StepGraph], None]:
    def damage(step: StepGraph) -> None:
        step.graph.erase_node(next(node for node in step.graph.nodes if node.target is target))

    return damage


def late(target: Callable[..., Any], after: Callable[..., Any]) -> Callable[[StepGraph], None]:
    """Move a node of the first offloaded bucket behind another of the same bucket."""

    def damage(step: StepGraph) -> None:
        bucket = next(bucket_of(node) for node in step.graph.nodes if node.target is g.reload)

        def of(kind: Callable[..., Any]) -> fx.Node:
            return next(node for node in step.graph.nodes if node.target is kind and bucket_of(node) == bucket)

        of(after).append(of(target))

    return damage


def too_early(step: StepGraph) -> None:
    reloads = [node for node in step.graph.nodes if node.target is g.reload]
    reloads[0].append(reloads[-1])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (without(g.reload), "is not being reloaded"),
        (without(g.await_reload), "without its optimizer state in memory"),
        (without(g.offload), "is left in memory"),
        (late(g.await_reload, g.update), "without its optimizer state in memory"),
        (late(g.reload, g.update), "is not being reloaded"),
        (late(g.update, g.offload), "before its update"),
        (too_early, "the window is 2"),
    ],
)
def test_a_broken_order_is_caught(damage: Callable[[StepGraph], None], problem: str) -> None:
    step = program()
    assert not check(step)
    damage(step)
    assert any(problem in one for one in check(step)), check(step)


# ---- options ----


def compiled(model: nn.Module | None = None, **given: Any) -> weft.Step:
    model = model or nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return weft.compile(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum(), **given)


def test_a_folder_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="there is no such folder; use 'auto', 'off' or a folder"):
        compiled(offload=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="this is a file"):
        compiled(offload=str(file))
    step = compiled(offload=tmp_path, passes={"offload": {"fragments": "all"}})
    step(torch.randn(2, 64))
    assert str(tmp_path) in step._executor.fragments.tier.describe()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(**more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"cannot be written to \(Permission denied\); use 'auto'"):
        compiled(offload=tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        *({"fragments": "some"}, {"fragments": [0, 0]}, {"fragments": [-1]}, {"fragments": 1}, {"fragments": [True]}),
        *({"window": 0}, {"window": "2"}, {"window": True}, {"overlap": 1}, {"folder": "/tmp"}),
    ],
)
def test_bad_choices_of_fragments_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"passes=\{'offload': \{"):
        compiled(passes={"offload": value})


def test_what_contradicts_itself_or_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        compiled(offload="off", passes={"offload": {"fragments": [0]}})
    with pytest.raises(ValueError, match=r"buckets \[5\] cannot be offloaded, only that of buckets \[0\]"):
        compiled(passes={"offload": {"fragments": [0, 5]}}).prepare(torch.randn(2, 64))


def test_the_plan_counts_blocks_instead_of_what_is_offloaded() -> None:
    def kept(**given: Any) -> int:
        step = compiled(passes={"shard": {"bucket_bytes": 1}, "offload": given})
        return step.prepare(torch.randn(2, 64)).state_bytes

    everything = kept()
    weight = 2 * 64 * 64 * 4  # bytes of AdamW's state
    assert everything - kept(fragments="all", window=1) == weight + 2 * 64 * 2 * 4
    assert everything - kept(fragments="all", window=100) < everything - kept(fragments="all", window=2)
    step = compiled(passes={"offload": {"fragments": "all"}})
    assert "its optimizer state is offloaded" in step.prepare(torch.randn(2, 64)).explain()
