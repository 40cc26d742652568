"""Every argument of `weft.compile`: what is accepted, and that an error shows the value seen and what is allowed."""

from __future__ import annotations

import gc
import math
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.options import budget_bytes, check_memory, check_options, host_memory


def compiled(**options: Any) -> weft.Step:
    model = nn.Linear(4, 2)
    return weft.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean(), **options
    )


DEFAULTS: dict[str, Any] = {
    "mode": "auto",
    "memory": None,
    "accumulate": 1,
    "clip_norm": None,
    "precision": None,
    "fuse": "auto",
    "offload": "auto",
    "passes": None,
    "seed": None,
    "cache_dir": None,
    "mesh": None,
    "timeout": 600.0,
    "debug": False,
    "plan": None,
}

BAD: dict[str, tuple[list[Any], list[str]]] = {
    "mode": (["zero4", "ddp", "ZeRO3", "", None, 3, True], ["auto", "replicate", "zero1", "zero2", "zero3"]),
    "memory": (
        [
            *("14", "GiB", "14 apples", "-1GiB", "1.2.3GiB", "", "14gib", b"1GiB", [1], True),
            *(0, -5, 0.0, 1.0, 1.5, -0.5, math.nan, math.inf),
        ],
        ["bytes as an int", "14GiB", "fraction"],
    ),
    "accumulate": ([0, -1, 1.0, 2.5, "2", True, None], ["whole number", "at least 1"]),
    "clip_norm": ([0, -1.0, 0.0, "1.0", True, math.nan, [1.0]], ["positive number", "None"]),
    "precision": ([torch.bfloat16, "bf16", {"compute": torch.bfloat16}, True], ["weft.Precision", "None"]),
    "fuse": (["inductor", "on", None, True, 1], ["'auto'", "'off'"]),
    "offload": (["/tmp/state", "cpu", None, True, 1], ["'auto'", "'off'"]),
    "passes": (["prefetch", ["prefetch"], True, 1], ["dict", "True, False"]),
    "seed": ([-1, 1.0, "1", True, 2**63], ["whole number", "torch.initial_seed()"]),
    "cache_dir": ([True, 3, __file__], ["folder", "None"]),
    "plan": ([True, 3, "no/such/plan.json"], ["step.plan.save", "None"]),
    "mesh": (["dp", 2, [0, 1]], ["DeviceMesh", "None"]),
    "timeout": (
        [0, -1, "60", None, True, math.nan, math.inf, timedelta(0), timedelta(seconds=-1)],
        ["seconds", "timedelta"],
    ),
    "debug": ([1, "yes", None], ["True", "False"]),
}

BAD_CASES = [(name, value, allowed) for name, (values, allowed) in BAD.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value", "allowed"), BAD_CASES, ids=[f"{name}={value!r}" for name, value, _ in BAD_CASES]
)
def test_a_bad_value_is_an_error_that_shows_it_and_what_is_allowed(name: str, value: Any, allowed: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        compiled(**{name: value})
    text = str(caught.value)
    assert f"{name}={value!r}" in text
    assert all(word in text for word in allowed), text


GOOD: dict[str, list[Any]] = {
    "mode": ["auto", "replicate", "zero1", "zero2", "zero3"],
    "memory": [None, 0.5, 0.999, 2**30, 10**12, "1.5GiB", "14GiB", "500 MB", " 2 TiB ", "800MiB"],
    "accumulate": [1, 2, 7],
    "clip_norm": [None, 1, 0.5, math.inf],
    "precision": [
        None,
        weft.Precision(),
        weft.Precision(compute=torch.bfloat16),
        weft.Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float32),
        weft.Precision(master=torch.float64),
    ],
    "fuse": ["auto", "off"],
    "offload": ["auto", "off"],
    "passes": [
        None,
        {},
        {"prefetch": False},
        {"prefetch": True, "stage_in_place": False},
        {"prefetch": {"rule": "earliest"}, "unshard": False, "replan": False},
        {"shard": {"bucket_bytes": 1000}},
        {"shard": True},
    ],
    "seed": [None, 0, 17, 2**63 - 1],
    "cache_dir": [None, "out/measured"],
    "plan": [None],
    "mesh": [None],
    "timeout": [1, 0.5, 600.0, timedelta(minutes=5)],
    "debug": [False, True],
}

GOOD_CASES = [(name, value) for name, values in GOOD.items() for value in values]


def test_the_tables_cover_every_argument() -> None:
    assert BAD.keys() == GOOD.keys() == DEFAULTS.keys()


@pytest.mark.parametrize(("name", "value"), GOOD_CASES, ids=[f"{name}={value!r}" for name, value in GOOD_CASES])
def test_a_good_value_compiles_and_takes_a_step(name: str, value: Any) -> None:
    step = compiled(**{name: value})
    batch = torch.ones(3, 4)
    loss = step([batch] * value if name == "accumulate" and value > 1 else batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_argument_may_only_be_given_by_keyword_and_unknown_ones_are_errors(name: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError):
        weft.compile(model, optimizer, None, DEFAULTS[name])  # type: ignore[misc]
    with pytest.raises(TypeError, match=f"{name}s_"):
        compiled(**{f"{name}s_": DEFAULTS[name]})


# ---- the model and the optimizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "model", nn.Linear, lambda x: x])
def test_a_model_that_is_no_module_is_an_error(model: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module") as caught:
        weft.compile(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert type(model).__name__ in str(caught.value)


@pytest.mark.parametrize("optimizer", [None, "adam", torch.optim.AdamW, 0.1])
def test_an_optimizer_that_is_none_is_an_error(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer") as caught:
        weft.compile(nn.Linear(2, 2), optimizer)
    assert type(optimizer).__name__ in str(caught.value)


@pytest.mark.parametrize("loss", ["mse", 1.0, nn.Linear(2, 2).weight])
def test_a_loss_that_cannot_be_called_is_an_error_at_compile(loss: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises((TypeError, ValueError), match="loss"):
        weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_a_model_without_parameters_is_an_error() -> None:
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no parameters"):
        weft.compile(nn.ReLU(), torch.optim.SGD(other.parameters(), lr=0.1))


def test_parameters_that_share_memory_are_an_error_that_names_both() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share memory"):
        weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_with_nothing_to_train_is_an_error() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        weft.compile(model, optimizer)


@pytest.mark.parametrize("refused", [False, True])
def test_a_step_that_nobody_holds_is_freed_with_its_model(refused: bool) -> None:
    model = nn.Linear(4, 2)
    gone = weakref.ref(model)
    if refused:
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ValueError, match="LBFGS"):
            weft.compile(model, optimizer, mode="zero3")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weft.compile(model, optimizer, lambda model, batch: model(batch).mean())(torch.ones(3, 4))
    del model, optimizer
    gc.collect()
    assert gone() is None


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["compute", "reduce", "master"])
def test_fp16_is_refused_because_it_needs_loss_scaling(field: str) -> None:
    with pytest.raises(ValueError, match="loss scaling") as caught:
        weft.Precision(**{field: torch.float16})
    assert f"{field}=torch.float16" in str(caught.value)
    assert "torch.bfloat16" in str(caught.value)


@pytest.mark.parametrize("field", ["compute", "reduce", "master"])
@pytest.mark.parametrize("value", [torch.int64, torch.complex64, "bf16", 16, True])
def test_a_dtype_that_cannot_be_trained_in_is_refused(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        weft.Precision(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)
    assert "torch.float32" in str(caught.value)


def test_precision_is_given_by_keyword() -> None:
    with pytest.raises(TypeError):
        weft.Precision(torch.bfloat16)  # type: ignore[misc]


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("7B", 7),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("3 MiB", 3 * 2**20),
        ("3MB", 3 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("1.5GB", 1_500_000_000),
        (" 2TiB ", 2**41),
        ("0.5GiB", 2**29),
    ],
)
def test_a_string_with_a_unit_is_that_many_bytes(written: str, expected: int) -> None:
    assert check_memory(written) == expected


def test_every_unit_that_an_error_names_is_understood() -> None:
    with pytest.raises(ValueError, match="units are") as caught:
        check_memory("1 parsec")
    units = str(caught.value).split("units are ")[1].split(", ")
    assert {"B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB"} <= set(units)
    sizes = [check_memory(f"1{unit}") for unit in units]
    assert all(isinstance(size, int) for size in sizes)
    assert len(set(sizes)) == len(units)


def test_a_fraction_is_of_the_device_and_bytes_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cpu = torch.device("cpu")
    assert budget_bytes(12345, cpu) == 12345
    assert budget_bytes(0.5, cpu) == pytest.approx(host_memory() / 2, abs=1)
    assert check_memory(None) == 0.9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_bytes(0.5, cpu) == pytest.approx(host_memory() / 8, abs=1)
    assert budget_bytes(12345, cpu) == 12345


@pytest.mark.parametrize("mode", ["auto", "replicate", "zero3"])
def test_a_budget_that_cannot_be_met_is_an_error_before_anything_runs_and_says_which_would_be(mode: str) -> None:
    batch = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"memory=16 .*memory=\d+") as caught:
        compiled(memory=16, mode=mode).prepare(batch)
    least = int(str(caught.value).split("Give memory=")[1].split(" ")[0])
    with pytest.raises(ValueError, match="too little"):
        compiled(memory=least - 1, mode=mode).prepare(batch)
    assert compiled(memory=least, mode=mode).prepare(batch).predicted.peak_bytes <= least


# ---- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unshards", "prefetching", "", "Shard"])
def test_an_unknown_pass_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="there is no such pass") as caught:
        compiled(passes={name: False})
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in ("shard", "prefetch", "stage_in_place"))


@pytest.mark.parametrize(
    ("passes", "shown"),
    [
        ({"prefetch": "off"}, "'off'"),
        ({"prefetch": None}, "None"),
        ({"prefetch": 1}, "1"),
        ({"prefetch": {"depth": 2}}, "{'depth': 2}"),
        ({"prefetch": {"rule": "latest"}}, "'latest'"),
        ({"shard": {"bucket_size": 2}}, "{'bucket_size': 2}"),
        ({"shard": {"bucket_bytes": 0}}, "0"),
        ({"shard": {"bucket_bytes": -5}}, "-5"),
        ({"shard": {"bucket_bytes": 1.5}}, "1.5"),
        ({"shard": {"bucket_bytes": True}}, "True"),
        ({"shard": {"bucket_bytes": "4MiB"}}, "'4MiB'"),
        ({"shard": False}, "False"),
    ],
)
def test_a_pass_with_a_bad_setting_is_an_error_that_shows_it(passes: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match="passes=") as caught:
        compiled(passes=passes)
    assert next(iter(passes)) in str(caught.value)
    assert shown in str(caught.value)


def test_a_bucket_size_cuts_the_parameters_into_more_buckets() -> None:
    counts = []
    for size in (100, 10**6):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"shard": {"bucket_bytes": size}}
        step = weft.compile(model, optimizer, lambda model, batch: model(batch).mean(), passes=options)
        counts.append(step.prepare(torch.ones(2, 4)).explain().count("\n"))
    assert counts[0] > counts[1]


def test_the_callers_dict_of_passes_is_not_kept() -> None:
    passes = {"prefetch": False}
    options = check_options(**{**DEFAULTS, "passes": passes})
    passes["prefetch"] = True
    assert not options.enabled("prefetch")
    assert options.enabled("stage_in_place")


# ---- mesh -----------------------------------------------------------------------------------------------------------


def test_a_mesh_of_two_dimensions_is_refused_and_a_slice_advised() -> None:
    mesh = SimpleNamespace(ndim=2, get_group=lambda *_: None, mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"2 dimensions .*'dp', 'tp'.*mesh\['dp'\]"):
        compiled(mesh=mesh)


def test_a_mesh_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="DeviceMesh"):
        compiled(mesh=SimpleNamespace(ndim=1))


# ---- what is given to a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [torch.ones(3, 4), [torch.ones(3, 4)], [torch.ones(3, 4)] * 3, {}])
def test_a_batch_that_is_not_accumulate_micro_batches_is_an_error(batch: Any) -> None:
    with pytest.raises(ValueError, match="accumulate=2: the batch is a list of 2 micro-batches"):
        compiled(accumulate=2)(batch)


def test_a_step_with_fewer_micro_batches_says_so() -> None:
    step = compiled(accumulate=3)
    with pytest.raises(ValueError, match=r"2 of them\. A step with fewer .*micro_batches="):
        step([torch.ones(3, 4)] * 2)
    assert torch.isfinite(step([torch.ones(3, 4)] * 2, micro_batches=2))
    for wrong in (0, 4):
        with pytest.raises(ValueError, match="1 to 3"):
            step([torch.ones(3, 4)] * wrong, micro_batches=wrong)


def test_the_gradient_norm_is_measured_only_where_it_is_asked_for() -> None:
    batch = torch.ones(3, 4)
    measuring, plain = compiled(clip_norm=math.inf), compiled()
    measuring(batch)
    plain(batch)
    # The mean of two outputs over equal rows of ones: every weight and bias has gradient 1/2.
    assert measuring.grad_norm == pytest.approx(math.sqrt(10 * 0.25))
    assert plain.grad_norm is None


def test_the_plan_says_which_mode_was_asked_for() -> None:
    for mode in ("replicate", "zero1", "zero2", "zero3"):
        step = compiled(mode=mode)
        assert mode in step.prepare(torch.ones(3, 4)).explain()


def test_a_plan_before_any_batch_is_an_error_that_names_prepare() -> None:
    with pytest.raises(RuntimeError, match=r"step\.prepare"):
        _ = compiled().plan
