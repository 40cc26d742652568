"""The benchmarks' own arithmetic, and that the documentation shows what was recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.peers import PEERS, REFERENCES
from benchmarks.rounds import LOSS_STEPS, Disagreement, Match, Outcome, spread
from benchmarks.workloads import NAMES, SIZES, workload

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
    return {
        **shape,
        "parameters": 10**6,
        "rounds": 2,
        "steps_a_turn": 3,
        "baseline": "ddp",
        "outcomes": outcomes,
    } | changes


def test_the_bound_counts_a_third_pass_for_who_releases_parameters() -> None:
    assert report.bound(result(), sharded=False) == pytest.approx(1.2)
    assert report.bound(result(), sharded=True) == pytest.approx(1.8)


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
