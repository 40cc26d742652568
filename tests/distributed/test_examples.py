"""The examples run as a user would run them, and learn something."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "WEFT_MEASURE": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SMALL = ["--width", "64", "--layers", "2", "--heads", "2", "--length", "64"]

pytestmark = pytest.mark.distributed


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_trains_reports_and_draws_its_curve(tmp_path: Path) -> None:
    demo = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "60", "--out", str(tmp_path), *SMALL]
    output = run(demo)
    first, last = map(float, re.search(r"training ([\d.]+) -> ([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert last < 0.85 * first
    assert "evaluation loss" in output
    assert re.search(r"\d+ gathers and \d+ reductions a step", output)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "checkpoint").exists(), "the next one starts afresh"


def test_ctrl_c_ends_the_demo_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--seconds", "200", "--out", str(tmp_path), *SMALL]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    time.sleep(25)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    assert "evaluation loss" in output
    assert "Traceback" not in errors


def test_a_killed_training_restarted_by_torchrun_has_the_curve_of_one_that_was_not(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "gpt.py")
    options = [*SMALL, "--steps", "40", "--save-every", "5", "--out", str(tmp_path), "--checkpoint"]

    def losses(checkpoint: str) -> list[float]:
        return json.loads((tmp_path / f"{checkpoint}-finished" / "checkpoint.json").read_text())["extra"]["losses"]

    run([*TORCHRUN, script, *options, str(tmp_path / "straight")])
    command = [*TORCHRUN, "--max-restarts", "1", script, *options, str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoint.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert "going on from step" in output
    assert losses("killed") == losses("straight")
    assert len(losses("killed")) == 40


@pytest.mark.parametrize("mode", ["auto", "zero3"])
def test_the_transformers_example_learns_and_generates(mode: str) -> None:
    output = run([*TORCHRUN, str(ROOT / "examples" / "huggingface.py"), "--mode", mode, "--steps", "25"])
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.9 * losses[0]
    assert "goes on as [" in output


def test_the_vision_example_learns() -> None:
    output = run([*TORCHRUN, str(ROOT / "examples" / "vision.py"), "--mode", "zero2"])
    accuracies = [float(found) for found in re.findall(r"rank \d: .*?accuracy (\d\.\d+)", output)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.5, "chance is 0.25"
