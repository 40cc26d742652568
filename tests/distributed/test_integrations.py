"""WeftTrainer does what the transformers Trainer does, and the examples of fitting in run."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from tests.distributed.trainer_worker import bert, llama, sentences, train
from weft.integrations.transformers import WeftTrainer

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MODES = ["replicate", "zero3"]

pytestmark = pytest.mark.distributed


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both Trainers' runs on two ranks."""
    out = tmp_path_factory.mktemp("trainer")
    run([*TORCHRUN, str(Path(__file__).with_name("trainer_worker.py")), str(out), ",".join(MODES)])
    return torch.load(out / "found.pt", weights_only=True)


def parameters_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max((value - other["parameters"][name]).abs().max().item() for name, value in one["parameters"].items())


def logs_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference in what was logged, the same things at the same steps."""
    assert [log.keys() for log in one["logs"]] == [log.keys() for log in other["logs"]]
    pairs = [(log[key], theirs[key]) for log, theirs in zip(one["logs"], other["logs"], strict=True) for key in log]
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_fp64_training_ends_where_the_plain_trainer_ends(found: dict[str, Any], mode: str) -> None:
    assert parameters_apart(found[mode], found["plain"]) < 1e-12
    assert (found[mode]["predicted"] - found["plain"]["predicted"]).abs().max() < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_fp32_losses_by_items_over_uneven_steps_end_where_the_plain_trainer_ends(
    found: dict[str, Any], mode: str
) -> None:
    assert parameters_apart(found[f"causal {mode}"], found["causal plain"]) < 1e-6
    assert (found[f"causal {mode}"]["predicted"] - found["causal plain"]["predicted"]).abs().max() < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_losses_norms_learning_rates_and_metrics_are_logged_as_by_the_plain_trainer(
    found: dict[str, Any], mode: str
) -> None:
    assert logs_apart(found[mode], found["plain"]) < 1e-6  # the Trainer adds losses up in fp32
    assert logs_apart(found[f"causal {mode}"], found["causal plain"]) < 1e-6
    logged = set().union(*found[mode]["logs"])
    assert {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"} <= logged


@pytest.mark.parametrize("mode", MODES)
def test_the_same_checkpoints_are_kept(found: dict[str, Any], mode: str) -> None:
    assert found[mode]["checkpoints"] == found["plain"]["checkpoints"]
    assert len(found[mode]["checkpoints"]) == 2


def test_early_stopping_stops_at_the_same_step(found: dict[str, Any]) -> None:
    stopped, whole = found["early"]["logs"][-1]["step"], found["plain"]["logs"][-1]["step"]
    assert stopped == found["early plain"]["logs"][-1]["step"] < whole
    assert parameters_apart(found["early"], found["early plain"]) < 1e-12


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(found: dict[str, Any]) -> None:
    assert found["resumed"]["logs"][-1]["step"] == found["whole"]["logs"][-1]["step"] > 2
    assert parameters_apart(found["resumed"], found["whole"]) == 0.0


def test_the_plain_trainer_goes_on_from_a_checkpoint_of_weft(found: dict[str, Any]) -> None:
    assert parameters_apart(found["resumed plain"], found["whole"]) < 1e-12


# ---- one process ----


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 3, "logging_steps": 1, **changes}
    return TrainingArguments(str(folder), **given)


def test_one_rank_ends_where_the_plain_trainer_ends(tmp_path: Path) -> None:
    """Gradients over three batches, the last step of an epoch over two."""
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "pad": 16}
    plain = train(Trainer, tmp_path / "plain", **options)
    compiled = train(WeftTrainer, tmp_path / "weft", mode="replicate", **options)
    assert parameters_apart(compiled, plain) < 1e-12
    assert logs_apart(compiled, plain) < 1e-6


def with_own_loss(kind: type[Trainer]) -> type[Trainer]:
    class OwnLoss(kind):  # type: ignore[valid-type,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, labels, label_smoothing=0.2)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def loss_by_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        {"own_loss": True},
        {"others": {"compute_loss_func": loss_by_items}},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"},
        {"optim": "adafactor", "max_grad_norm": 0},
        {"activation_checkpointing": True, "eval_on_start": True},
    ],
    ids=["own compute_loss", "compute_loss_func", "label smoothing", "plateau", "adafactor", "checkpointing"],
)
def test_losses_schedulers_and_optimizers_of_ones_own_work(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"max_steps": 3, "pad": 16, **options}
    kinds = [Trainer, WeftTrainer]
    if options.pop("own_loss", False):
        kinds = [with_own_loss(kind) for kind in kinds]
    plain = train(kinds[0], tmp_path / "plain", **options)
    compiled = train(kinds[1], tmp_path / "weft", mode="replicate", **options)
    assert parameters_apart(compiled, plain) < 1e-12
    assert logs_apart(compiled, plain) < 1e-6


def test_dropout_goes_on_where_the_checkpoint_was_taken(tmp_path: Path) -> None:
    options = {"mode": "replicate", "pad": 16, "dropout": 0.2, "max_steps": 4}
    whole = train(WeftTrainer, tmp_path / "whole", **options)
    resumed = train(WeftTrainer, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-2", **options)
    assert parameters_apart(resumed, whole) == 0.0
    assert parameters_apart(train(WeftTrainer, tmp_path / "other", **{**options, "dropout": 0.1}), whole) > 1e-4


def test_on_one_rank_training_evaluates_saves_and_loads(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="no", gradient_accumulation_steps=2)
    trainer = WeftTrainer(model=llama(), args=args, train_dataset=sentences(32, causal=True, seed=1))
    before = trainer.evaluate(sentences(8, causal=True, seed=2))["eval_loss"]  # before there is a step
    trainer.train()
    assert trainer.evaluate(sentences(8, causal=True, seed=2))["eval_loss"] != before
    trainer.save_model()
    again = type(llama()).from_pretrained(tmp_path)
    with trainer.step.gathered() as model:
        for name, value in model.named_parameters():
            assert torch.equal(value, again.get_parameter(name)), name


def test_bf16_trains_under_autocast(tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True, save_strategy="no")
    trainer = WeftTrainer(model=llama(), args=args, train_dataset=sentences(32, causal=True, seed=1))
    assert math.isfinite(trainer.train().training_loss)
    graph = trainer.step.plan.code()
    assert "torch.bfloat16" in graph


@pytest.mark.parametrize(
    ("changes", "weft_options", "message"),
    [
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True"),
        ({"torch_compile": True}, {}, "torch_compile=True"),
        ({}, {"accumulate": 2}, "gradient_accumulation_steps"),
        ({}, {"clip_norm": 1.0}, "max_grad_norm"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_what_to_do(
    tmp_path: Path, changes: dict[str, Any], weft_options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WeftTrainer(model=bert(), args=arguments(tmp_path, **changes), weft=weft_options)


# ---- examples ----


def test_the_trainer_example_learns_to_count(tmp_path: Path) -> None:
    output = run([*TORCHRUN, "examples/trainer.py", "--mode", "zero3", "--out", str(tmp_path)])
    assert "goes on as [21, 24, 27, 30, 33, 36]" in output


@pytest.mark.parametrize(
    ("script", "options", "pattern", "least"),
    [
        ("lightning_like.py", ["--mode", "zero2"], r"validation  loss ([\d.]+)", -0.5),
        ("accelerate_loader.py", ["--mode", "zero3"], r"accuracy ([\d.]+)", 0.8),
        ("hydra_like.py", ["weft.mode=zero1", "optimizer.lr=0.02"], r"step  59  loss ([\d.]+)", -0.25),
    ],
)
def test_the_examples_of_fitting_in_learn(script: str, options: list[str], pattern: str, least: float) -> None:
    output = run([*TORCHRUN, f"examples/{script}", *options])
    value = float(re.findall(pattern, output)[-1])
    assert math.copysign(value, least) >= least, output


def test_the_configured_example_says_which_names_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "examples/hydra_like.py", "optimizr.lr=1"],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "optimizr.lr=1: write name=value" in done.stderr
