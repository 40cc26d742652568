"""The benchmarks' own arithmetic, and that the documentation shows what was recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from benchmarks import report
from benchmarks.peers import ABLATIONS, PEERS, REFERENCES, standard
from benchmarks.peers.weft import sent_elements
from benchmarks.prediction import Row, kendall_tau, summary
from benchmarks.rounds import LOSS_STEPS, Disagreement, Match, Outcome, spread
from benchmarks.workloads import NAMES, SIZES, Work, workload

ROOT = Path(__file__).parent.parent


def test_readme_shows_the_recorded_figures() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "<!-- figures: " in readme
    assert report.with_figures(readme, report.load()) == readme, "run python -m benchmarks.report"


def test_the_page_of_results_and_its_charts_are_made_from_the_recorded_files() -> None:
    results = report.load()
    assert results
    assert (report.RESULTS / "README.md").read_text() == report.page(results), "run python -m benchmarks.report"
    for result in results:
        assert (report.RESULTS / report.picture(result)).read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_a_result_is_an_error() -> None:
    with pytest.raises(ValueError, match="no result is named 'nothing'"):
        report.with_figures("<!-- figures: nothing -->\n\n<!-- end -->", [])


def losses(values: list[float], peer: str) -> Outcome:
    return Outcome(peer, peer, losses=values)


def test_contestants_whose_losses_differ_end_the_run() -> None:
    base = [2.0 - 0.1 * step for step in range(LOSS_STEPS)]
    Match._compare_losses([losses(base, "ddp"), losses([value * (1 + 5e-5) for value in base], "fsdp2")])
    for wrong in (base[-1] * (1 + 2e-4), float("nan")):
        with pytest.raises(Disagreement, match=f"rank 0 in step {LOSS_STEPS}"):
            Match._compare_losses([losses(base, "ddp"), losses([*base[:-1], wrong], "fsdp2")])


def result(**changes: Any) -> dict[str, Any]:
    outcomes = {
        name: vars(Outcome(name, name, seconds=seconds, ratios=[second / 2 for second in seconds], peak_bytes=2**20))
        for name, seconds in {"compute": [1.0], "wire": [0.6], "ddp": [2.0, 2.0], "weft-zero3": [1.8, 3.6]}.items()
    }
    outcomes["fsdp2"] = vars(Outcome("fsdp2", "FSDP2", why_not="it has no | LSTM"))
    shape = {"workload": "gpt", "size": "small", "hosts": 2, "gbit": [1.0, 1.0], "lab": "2 hosts"}
    run = {"parameters": 10**6, "rounds": 2, "steps_a_turn": 3, "baseline": "ddp", "outcomes": outcomes}
    return {**shape, **run, **changes}


def test_the_bound_is_the_wire_or_compute_with_the_cpu_time_of_communication() -> None:
    given = result()
    assert report.bound(given, passes=2) == pytest.approx(1.2)
    assert report.bound(given, passes=3) == pytest.approx(1.8)
    assert report.bound(given, passes=1) == pytest.approx(1.0)
    given["outcomes"]["wire"]["cpu_seconds"] = [0.2]
    assert report.bound(given, passes=2) == pytest.approx(1.4)
    assert report.bound(given, passes=3) == pytest.approx(1.8)
    assert "0.600 s (and 0.200 s of CPU, which the bound adds to compute)" in report.markdown(given)


@pytest.mark.parametrize(
    ("peer", "once", "of_16"),
    [
        ("ddp", 2, 2),
        ("deepspeed-1", 2, 2),
        ("deepspeed-2", 2, 17),
        ("deepspeed-3", 3, 48),
        ("fsdp2", 3, 48),
        ("fsdp2-once", 3, 33),
        ("fsdp2-keep", 2, 32),
    ],
)
def test_passes_of_a_step_count_micro_batches(peer: str, once: int, of_16: int) -> None:
    outcomes = {peer: vars(Outcome(peer, peer))}
    assert report.passes({"outcomes": outcomes}, peer) == once
    assert report.passes({"outcomes": outcomes, "accumulate": 16}, peer) == of_16
    outcomes[peer]["passes"] = 5.5  # a plan knows better
    assert report.passes({"outcomes": outcomes, "accumulate": 16}, peer) == 5.5


def test_the_passes_of_a_plan_count_every_message() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def passes(mode: str, accumulate: int) -> float:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        plan = {"shard": {"bucket_bytes": 1024}, "unshard": False}
        step = weft.compile(
            model, optimizer, lambda m, x: m(x).sum(), mode=mode, accumulate=accumulate, passes=plan, memory="1GiB"
        )
        batch = torch.randn(2, 16)
        return sent_elements(step.prepare([batch] * accumulate if accumulate > 1 else batch)) / 1024

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert [passes(mode, 1) for mode in ("replicate", "zero1", "zero2")] == [2, 2, 2]
        assert [passes(mode, 4) for mode in ("replicate", "zero1", "zero2")] == [2, 2, 5]
        assert passes("zero3", 4) > passes("zero3", 1) > 2
    finally:
        torch.distributed.destroy_process_group()


def test_settings_are_in_the_title_and_the_file_name() -> None:
    assert report.file_name(result()) == "gpt-small-2x1.json"
    assert report.file_name(result(gbit=[1.0, 0.5], clip=None, accumulate=1)) == "gpt-small-2xmixed.json"
    both = result(clip=0.5, accumulate=16)
    assert report.file_name(both, part=1) == "gpt-small-2x1-clip-acc16-2.json"
    assert report.title(both).endswith("1 Gbit/s, clipped to norm 0.5, 16 micro-batches a step")
    assert "AdamW, clipped to norm 0.5, 16 micro-batches a step; " in report.markdown(both)
    ablations = result(ablations=True)
    assert report.file_name(ablations) == "gpt-small-2x1-ablations.json"
    assert len({report.picture(r) for r in (result(), both, ablations)}) == 3


def test_only_accumulation_brings_the_peer_that_differs_in_it() -> None:
    for full in (False, True):
        assert "fsdp2-once" not in standard(full, Work())
        assert "fsdp2-once" in standard(full, Work(accumulate=2))
        assert not set(ABLATIONS) & set(standard(full, Work()))


def test_kendalls_tau_counts_pairs_in_order() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 1], [10, 20]) == 0


def test_the_summary_of_predictions_orders_plans_within_a_workload_and_over_all() -> None:
    def row(workload: str, predicted: float, measured: float) -> Row:
        return Row(workload, 1.0, "zero1", predicted, measured, measured, 90, 100)

    found = summary([row("gpt", 1.0, 2.0), row("gpt", 2.0, 2.5), row("lstm", 4.0, 1.6), row("lstm", 3.0, 1.5)])
    assert found["tau_of_plans"] == 1
    assert found["tau_of_all"] == pytest.approx((2 - 4) / 6)
    assert found["worst_time_error"] == pytest.approx(1.5)
    assert found["mean_memory_error"] == pytest.approx(0.1)


def test_a_peer_that_cannot_run_stands_in_the_table_with_its_reason() -> None:
    table = report.markdown(result())
    assert "| FSDP2 | cannot run: it has no / LSTM |" in table
    assert "| weft-zero3 | 1.35 | 1.12 to 1.58 | 2.700 | 1.50 |" in table


def test_spread_is_the_quartiles() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_gives_a_loss_and_has_the_blocks_it_names(name: str) -> None:
    given = workload(name, "small")
    torch.manual_seed(0)
    model = given.build(given.dropout)
    loss = given.loss(model, given.batch(torch.Generator().manual_seed(0)))
    assert torch.isfinite(loss)
    assert {type(module).__name__ for module in model.modules()} >= set(given.blocks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "gtp"], "there is no workload 'gtp'"),
        (["--peers", "ddp,horovod"], "there is no peer 'horovod'"),
        (["--size", "huge"], f"use {', '.join(SIZES)}"),
        (["--gbit", "fast"], "--gbit fast"),
        (["--clip", "0"], "--clip 0: a positive norm"),
        (["--accumulate", "0"], "--accumulate 0"),
        (["--hosts", "64"], "--oversubscribe"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert run.returncode == 2
    assert said in run.stderr or "root" in run.stderr or "iproute2" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_every_peer_can_be_found() -> None:
    for peer in (PEERS | REFERENCES).values():
        assert callable(peer.builder({}))
