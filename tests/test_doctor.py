"""The doctor finds what is wrong, says so in words, and finds nothing where nothing is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.doctor import machine, network
from weft.doctor.compare import AGREES, DISAGREES, NOTHING_COMPARED, Comparison, Difference, run_script
from weft.doctor.findings import Finding, report, summary
from weft.doctor.network import Interface, _gloo_from_hostname, _named, _nccl

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
DOCTOR = [sys.executable, "-m", "weft", "doctor"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft"]
ETHERNET, LOOPBACK = Interface("eth0", ("10.0.0.5",), True), Interface("lo", ("127.0.0.1",), True)

SCRIPT = """
import sys
import torch
from torch import nn
from weft import compile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.out = nn.Linear(8, 1)
        self.scales = [1.0]  # weft does not look into lists

    def forward(self, x):
        return self.out(self.drop(self.norm(self.inner(x)).relu())).squeeze(-1) * self.scales[0]

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
step = compile(model, optimizer, lambda model, b: (model(b[0]) - b[1]).square().mean(),
               mode=sys.argv[1], accumulate=2, clip_norm=0.1)
for index in range(10):
    step([(torch.randn(5, 6), torch.randn(5)) for _ in range(2)])
    schedule.step()
    if "--planted" in sys.argv and index == 1:
        model.scales[0] = 0.5
print("the script goes on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


# ---- a script against eager ----


def test_a_script_with_dropout_batch_norm_accumulation_clipping_and_a_scheduler_agrees(script: Path) -> None:
    comparison = run_script([str(script), "replicate"], steps=3)
    assert comparison.exit_code() == AGREES
    assert len(comparison.steps) == 3
    kinds = {difference.kind for difference in comparison.steps[0]}
    assert kinds == {"loss", "norm", "parameter", "buffer", "optimizer"}
    assert "3 steps agree with eager PyTorch (1 rank, mode replicate)" in comparison.report()


def test_a_value_that_weft_froze_is_found_and_named_at_the_step_where_it_changed(script: Path) -> None:
    comparison = run_script([str(script), "replicate", "--planted"], steps=5)
    assert comparison.exit_code() == DISAGREES
    step, difference = comparison.first() or pytest.fail("nothing was found")
    assert (step, difference.what) == (3, "loss")
    assert difference.relative == pytest.approx(1.0, abs=1.5)
    assert "2 step(s) agreed" in comparison.report()
    assert "lists" in comparison.report()


def test_a_wrong_update_is_found_by_the_name_of_its_parameter(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.state.optimizer import BucketOptimizer

    right = BucketOptimizer.step

    def wrong(self: BucketOptimizer, gradient: torch.Tensor, *args: object) -> None:
        right(self, gradient * 1.001, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BucketOptimizer, "step", wrong)
    comparison = run_script([str(script), "replicate"], steps=3)
    step, difference = comparison.first() or pytest.fail("nothing was found")
    assert step == 1
    assert difference.what.startswith(("parameter", "optimizer state"))
    assert "the loss agrees and the update does not" in comparison.report()


def test_weights_that_a_script_edits_between_steps_are_no_disagreement(tmp_path: Path) -> None:
    path = tmp_path / "edits.py"
    path.write_text(
        SCRIPT.replace(
            "    schedule.step()", "    with step.gathered() as m, torch.no_grad():\n        m.out.bias.add_(1)"
        )
    )
    assert run_script([str(path), "replicate"], steps=3).exit_code() == AGREES


def test_an_optimizer_with_a_closure_agrees(tmp_path: Path) -> None:
    path = tmp_path / "lbfgs.py"
    path.write_text(SCRIPT.replace("AdamW(model.parameters(), lr=1e-2)", "LBFGS(model.parameters(), max_iter=3)"))
    assert run_script([str(path), "replicate"], steps=3).exit_code() == AGREES


def test_a_model_on_the_meta_device_agrees(tmp_path: Path) -> None:
    path = tmp_path / "meta.py"
    path.write_text(SCRIPT.replace("model = Net()", "with torch.device('meta'):\n    model = Net()"))
    assert run_script([str(path), "replicate"], steps=3).exit_code() == AGREES


def test_bf16_compute_agrees_within_its_rounding(tmp_path: Path) -> None:
    path = tmp_path / "bf16.py"
    precision = "precision=__import__('weft').Precision(compute=torch.bfloat16, reduce=torch.float32), accumulate"
    path.write_text(SCRIPT.replace("accumulate", precision).replace("BatchNorm1d", "LayerNorm"))
    assert run_script([str(path), "replicate"], steps=3).exit_code() == AGREES


def test_a_script_that_never_steps_and_one_that_cannot_be_compiled_say_so(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("import weft\n")
    idle = run_script([str(path)], steps=3)
    assert idle.exit_code() == NOTHING_COMPARED
    assert "never called a step" in idle.report()
    path.write_text(
        SCRIPT.replace(".relu()", "").replace("return self", "self.scales[0] *= float(x.sum())\n        return self")
    )
    refused = run_script([str(path), "replicate"], steps=3)
    assert refused.exit_code() == DISAGREES
    assert "weft does not compile this step" in refused.report()


def test_after_a_script_weft_compiles_as_before(script: Path) -> None:
    import weft

    run_script([str(script), "replicate"], steps=1)
    model = torch.nn.Linear(2, 1)
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    assert type(step) is weft.Step


def test_a_nan_on_one_side_is_a_disagreement() -> None:
    comparison = Comparison(wanted=3, steps=[[Difference("loss", float("nan"), float("nan"))]])
    assert comparison.exit_code() == DISAGREES


@pytest.mark.distributed
@pytest.mark.parametrize(("extra", "code"), [([], 0), (["--planted"], 1)])
def test_under_torchrun_every_rank_is_compared(script: Path, extra: list[str], code: int) -> None:
    done = subprocess.run(
        [*TORCHRUN, "doctor", str(script), "zero3", *extra],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    expected = "step 3 does not agree" if extra else "3 steps agree"
    assert done.stdout.count(f"weft doctor: {expected} with eager PyTorch (2 ranks, mode zero3)") == 1, done.stdout
    assert "the script goes on" not in done.stdout


@pytest.mark.parametrize("example", [["lightning_like.py"], ["hydra_like.py", "weft.mode=zero1"], ["vision.py"]])
def test_the_examples_agree_with_eager(example: list[str]) -> None:
    threads = torch.get_num_threads()
    try:
        comparison = run_script([str(ROOT / "examples" / example[0]), *example[1:]], steps=3)
    finally:
        torch.set_num_threads(threads)
    assert comparison.exit_code() == AGREES, comparison.report()
    assert len(comparison.steps) == 3


# ---- the machine and its peers ----


def test_this_machine_is_described_in_aligned_lines() -> None:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for subject in ("torch", "backends", "threads", "memory", "shm", "files", "interfaces", "gloo", "nccl"):
        assert f"  {subject} " in done.stdout
    assert torch.__version__ in done.stdout


@pytest.mark.distributed
def test_under_torchrun_collectives_are_checked_and_timed() -> None:
    done = subprocess.run([*TORCHRUN, "doctor"], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("ranks         2, by host", "clocks", "all-reduce    right; 4.0 KiB", "all-gather    right; 4.0 KiB"):
        assert done.stdout.count(line) == 1, done.stdout


def _as_rank(rank: int, *, timeout: int) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.run(
        [*DOCTOR, "--timeout", str(timeout)],
        capture_output=True, text=True, timeout=60, env={**ENVIRONMENT, **place}, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.distributed
def test_a_peer_that_does_not_answer_is_named() -> None:
    alone = _as_rank(0, timeout=1)
    assert alone.returncode == 1
    assert "no answer from ranks 1, 2 of 3 within 1 s" in alone.stdout
    lost = _as_rank(1, timeout=1)
    assert lost.returncode == 1
    assert "no answer from rank 0 at 127.0.0.1:" in lost.stdout


STALLS = """
import os, sys, time
from weft.cli.doctor import examine
from weft.doctor import peers

measure = peers._measure
if os.environ["RANK"] == "1":
    peers._measure = lambda test: time.sleep(12) if test.name == "all-gather" else measure(test)
sys.exit(examine(timeout=2.0))
"""


@pytest.mark.distributed
def test_a_peer_that_stops_in_the_middle_is_named_and_those_that_wait_for_it_are_not(tmp_path: Path) -> None:
    script = tmp_path / "stalls.py"
    script.write_text(STALLS)
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [*TORCHRUN[:-3], "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 1
    assert "ranks that did not finish the test within 2 s: 1 (" in done.stdout, done.stdout + done.stderr


def test_a_name_that_resolves_to_the_loopback_is_a_problem_on_several_hosts_only() -> None:
    here = [LOOPBACK, ETHERNET]
    assert _gloo_from_hostname("node", ["127.0.1.1"], here, hosts=1).mark == "OK"
    several = _gloo_from_hostname("node", ["127.0.1.1"], here, hosts=2)
    assert several.mark == "FAIL"
    assert "127.0.1.1" in several.text
    assert "GLOO_SOCKET_IFNAME" in several.advice
    assert _gloo_from_hostname("node", ["10.0.0.5"], here, hosts=2).mark == "OK"
    assert _gloo_from_hostname("node", [], here, hosts=2).mark == "FAIL"
    assert _gloo_from_hostname("node", ["10.9.9.9"], here, hosts=2).mark == "FAIL"


def test_an_interface_that_is_not_there_is_a_problem_and_the_others_are_named() -> None:
    finding = _named("gloo", ["eth9"], [LOOPBACK, ETHERNET], 1, "GLOO_SOCKET_IFNAME")
    assert finding.mark == "FAIL"
    assert "eth0" in finding.advice
    assert _named("gloo", ["lo"], [LOOPBACK, ETHERNET], 2, "GLOO_SOCKET_IFNAME").mark == "FAIL"
    assert _named("gloo", ["eth0"], [LOOPBACK, ETHERNET], 2, "GLOO_SOCKET_IFNAME").mark == "OK"


def test_nccl_takes_infiniband_first_and_follows_its_variable() -> None:
    here = [LOOPBACK, Interface("docker0", ("172.17.0.1",), True), ETHERNET, Interface("ib0", ("10.1.0.5",), True)]
    assert "ib0" in _nccl("", here, 2).text
    assert "eth0" in _nccl("eth", here, 2).text
    assert "docker0" not in _nccl("^docker,lo", here, 2).text
    assert _nccl("=eth", here, 2).mark == "FAIL"
    assert _nccl("", [LOOPBACK], 2).mark == "FAIL"
    assert _nccl("", [replace(ETHERNET, up=False), LOOPBACK], 1).mark == "OK"


def test_more_threads_than_cores_is_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    finding = machine._threads()
    assert finding.mark == "warn"
    assert "OMP_NUM_THREADS=2" in finding.advice


def test_the_report_says_what_to_do_and_counts() -> None:
    findings = [Finding("OK", "a", "fine"), Finding("FAIL", "b", "bad", "mend it"), Finding("warn", "c", "hm")]
    assert report(findings).splitlines()[1:3] == [f"FAIL  {'b':<12}  bad", " " * 20 + "-> mend it"]
    assert summary(findings) == "1 problem, 1 thing worth a look"
    assert summary(findings[:1]) == "everything is fine"


def test_the_interfaces_of_this_machine_are_found() -> None:
    found = {one.name: one for one in network.interfaces()}
    assert any(one.loopback for one in found.values())
