"""Ops are measured under keys that mean the same everywhere, in bounds of memory, and nothing measured gets lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import weft
from tests.models import TiedGPT
from weft._torch import fake_mode, make_fx
from weft.errors import StoreError
from weft.measure import ops as measure_module
from weft.measure.inputs import Maker, index_limits
from weft.measure.keys import op_key
from weft.measure.ops import bytes_needed, measure_ops
from weft.measure.store import Store, default_folder
from weft.measure.values import is_op, is_view
from weft.predict.ops import OpTimes
from weft.predict.roofline import Roofline, flops_and_bytes, measure_roofline

CPU = torch.device("cpu")
aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
RATES = Roofline({"float32": 1e10}, 1e10, 1e-6)


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> list[fx.Node]:
    """The op nodes of a function on tensors like these."""
    mode = fake_mode()
    with mode:
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, requires_grad=one.requires_grad)
            for one in tensors
        ]
        return [node for node in make_fx(function)(*fakes).graph.nodes if is_op(node)]


def find(nodes: list[fx.Node], target: Any) -> fx.Node:
    return next(node for node in nodes if node.target is target)


def step_nodes(model: nn.Module, batch: Any) -> list[fx.Node]:
    step = weft.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step.prepare(batch)
    return list(step.plan.programs["only"].graph.nodes)


def measured(nodes: list[fx.Node], store: Store | None = None, **settings: Any) -> dict[str, float]:
    return measure_ops(nodes, store or Store(None, CPU), device=CPU, **({"memory_limit": 1 << 30} | settings))


# Another process, that says what keys it gives to a step's ops, and saves now and then.
OTHER = """
import sys, torch
from pathlib import Path
from tests.models import TiedGPT
from tests.test_measure import keys_of, step_nodes
from weft.measure.store import Store
torch.set_num_threads(int(sys.argv[3]))
print(keys_of(step_nodes(TiedGPT(), torch.zeros(2, 8, dtype=torch.int64))))
for index in range(30):
    store = Store(Path(sys.argv[1]), torch.device("cpu"))
    store.put("ops", f"{sys.argv[2]}/{index}", 0.5)
    store.save()
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two processes that ran at once: the folder to which they saved, and what they printed."""
    folder = tmp_path_factory.mktemp("store")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder), name, str(torch.get_num_threads())],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return folder, printed


# ---- keys ----


def test_equal_ops_have_one_key_and_other_strides_shapes_dtypes_and_values_another() -> None:
    x, y = torch.empty(4, 4), torch.empty(4, 4)

    def several(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x + y, y + x, x.t() + y, x.double() + y, x[:2] + y[:2], torch.add(x, y, alpha=2), x + x

    nodes = [node for node in graph_of(several, x, y) if node.target is aten.add.Tensor]
    keys = [op_key(node) for node in nodes]
    assert keys[0] == keys[1] == "aten.add.Tensor(f32[4,4], f32[4,4])"
    assert len(set(keys)) == 6
    assert "f32[4,4](1,4)" in keys[2]


def test_a_key_is_the_same_in_another_process(others: tuple[Path, list[str]]) -> None:
    mine = str(keys_of(step_nodes(TiedGPT(), torch.zeros(2, 8, dtype=torch.int64))))
    assert [one.strip() for one in others[1]] == [mine, mine]


def keys_of(nodes: list[fx.Node]) -> list[str]:
    return sorted({op_key(node) for node in nodes if is_op(node)})


def test_views_share_a_key_and_a_reshape_that_copies_is_no_view() -> None:
    nodes = graph_of(lambda x: (x.reshape(2, 8), x.t().reshape(2, 8)), torch.empty(4, 4))
    assert op_key(find(nodes, aten.t.default)) == "aten.t.default view"
    assert not any(is_view(node) for node in nodes if node.target is aten.clone.default)


def test_open_sizes_count_as_what_they_are_in_the_traced_batch() -> None:
    with fake_mode(symbolic=True) as mode:
        from weft._torch import new_size

        assert mode.shape_env is not None
        size = new_size(mode.shape_env, 6, "n")
        x = torch.empty(size, 3)
        graph = make_fx(lambda x: torch.add(x, x.new_zeros(x.shape[0], 1)), tracing_mode="real")(x).graph
    nodes = [node for node in graph.nodes if is_op(node)]
    assert op_key(find(nodes, aten.add.Tensor)) == "aten.add.Tensor(f32[6,3], f32[6,1])"
    assert op_key(find(nodes, aten.add.Tensor)) in measured(nodes)


# ---- the store ----


def test_processes_that_save_at_once_lose_nothing(others: tuple[Path, list[str]], tmp_path: Path) -> None:
    assert len(Store(others[0], CPU).sections()["ops"]) == 60
    one, two = Store(tmp_path, CPU), Store(tmp_path, CPU)
    one.put("links", "x", [1, 2])
    two.put("links", "y", {"z": None})
    one.save()
    two.save()
    assert two.get("links", "x") == [1, 2]
    assert Store(tmp_path, CPU).get("links", "y") == {"z": None}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_cannot_be_used_says_why_and_what_to_do(tmp_path: Path) -> None:
    store = Store(tmp_path, CPU)
    store.put("ops", "a", 1.0)
    store.save()
    assert store.path is not None
    good = json.loads(store.path.read_text())
    for content, words in (
        ("{", "damaged"),
        ("[]", "no format"),
        (json.dumps({**good, "format": 0}), "format 0.*measure again with weft measure"),
        (json.dumps({**good, "ops": [1]}), "section ops is a list"),
    ):
        store.path.write_text(content)
        with pytest.raises(StoreError, match=f"{store.path}: .*{words}"):
            Store(tmp_path, CPU)
        with pytest.raises(StoreError, match=words):
            Store.from_table(store.path)
    foreign = {**good, "machine": {**good["machine"], "model": "another"}}
    store.path.write_text(json.dumps(foreign))
    with pytest.raises(StoreError, match=r"measured on another machine \(model 'another', here"):
        Store(tmp_path, CPU)
    table = Store.from_table(store.path)
    assert table.get("ops", "a") == 1.0
    table.put("ops", "b", 1.0)
    table.save()
    assert json.loads(store.path.read_text()) == foreign
    with pytest.raises(StoreError, match="no such table"):
        Store.from_table(tmp_path / "missing.json")


def test_a_folder_that_cannot_be_written_warns_once_and_measurements_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file", CPU)
    store.put("ops", "a", 1.0)
    with pytest.warns(UserWarning, match="cannot keep its measurements.*WEFT_CACHE_DIR") as seen:
        store.save()
    store.save()
    assert len(seen) == 1
    assert store.get("ops", "a") == 1.0


def test_the_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == Path("/x/weft")
    monkeypatch.setenv("WEFT_CACHE_DIR", "/y")
    assert default_folder() == Path("/y")


# ---- measuring ----


def test_nothing_is_measured_beyond_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = graph_of(lambda x, y: (x + 1, y + 1), torch.empty(1000), torch.empty(10))
    large, small = nodes
    assert bytes_needed(large) == 8000
    made: list[int] = []
    right = measure_module.Maker._tensor

    def counted(self: Maker, spec: Any, *args: Any) -> Any:
        made.append(spec.nbytes)
        return right(self, spec, *args)

    monkeypatch.setattr(Maker, "_tensor", counted)
    store = Store(None, CPU)
    found = measured(nodes, store, memory_limit=7999)
    assert found.keys() == {op_key(small)}
    assert max(made) == 40
    times = OpTimes(store, RATES)
    assert [times.source(node) for node in nodes] == ["roofline", "measured"]
    assert times.seconds(large) == pytest.approx(1e-6 + 8000 / 1e10)


def test_measuring_leaves_the_generator_where_it_was() -> None:
    nodes = graph_of(lambda x: (torch.rand_like(x), torch.bernoulli(x), F.dropout(x, 0.5)), torch.empty(5, 5))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert len(measured(nodes)) == len({op_key(node) for node in nodes})
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_known_is_not_measured_again() -> None:
    nodes = graph_of(lambda x: (x + 1, x * 2), torch.empty(3, 3))
    store = Store(None, CPU)
    store.put("ops", op_key(nodes[0]), 7.0)
    found = measured(nodes, store)
    assert found[op_key(nodes[0])] == 7.0
    assert found == {op_key(node): store.get("ops", op_key(node)) for node in nodes}


def test_an_op_that_raises_is_remembered_and_estimated() -> None:
    nodes = graph_of(lambda x: x.view(6), torch.empty(2, 3))
    nodes[0].args = (nodes[0].args[0], [7])  # not what the trace saw
    nodes[0].meta["val"] = torch.empty(7, device="meta")
    store = Store(None, CPU)
    assert measured(nodes, store) == {}
    assert store.failed == {op_key(nodes[0])}
    assert OpTimes(store, RATES).seconds(nodes[0]) > 0


def test_out_variants_write_to_a_tensor_of_their_own_and_step_nodes_are_skipped() -> None:
    nodes = step_nodes(TiedGPT(), torch.zeros(2, 8, dtype=torch.int64))
    written = [node for node in nodes if "out" in node.kwargs]
    assert written
    found = measured(nodes)
    assert all("out=f32[" in op_key(node) and op_key(node) in found for node in written)
    assert not any("weft" in key for key in found)


def test_progress_ends_at_the_total_and_a_budget_of_seconds_ends_early() -> None:
    nodes = graph_of(lambda x: (x + 1, x * 2, x.sum()), torch.empty(9))
    calls: list[tuple[int, int]] = []
    measured(nodes, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3, 3)
    assert len(measured(nodes, seconds=0.0)) < 3


# ---- indices ----


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)[0]


def _losses(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(F.cross_entropy(x, target), x)[0]


def _looked_up(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(F.embedding(ids, weight).sum(), weight)[0]


I64 = torch.empty(8, dtype=torch.int64)
INDEXED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[Any, int]]] = {
    "embedding": (
        _looked_up,
        (torch.empty(5, 3, requires_grad=True), I64),
        {aten.embedding.default: 5, aten.embedding_dense_backward.default: 5},
    ),
    "cross entropy": (
        _losses,
        (torch.empty(8, 7, requires_grad=True), I64),
        {aten.nll_loss_forward.default: 7, aten.nll_loss_backward.default: 7},
    ),
    "cross entropy of images": (
        _losses,
        (torch.empty(2, 6, 4, 4, requires_grad=True), torch.empty(2, 4, 4, dtype=torch.int64)),
        {aten.nll_loss2d_forward.default: 6, aten.nll_loss2d_backward.default: 6},
    ),
    "gather": (lambda x, i: x.gather(-1, i), (torch.empty(2, 9), I64.view(2, 4)), {aten.gather.default: 9}),
    "scatter": (
        lambda x, i: x.scatter_add(0, i, x),
        (torch.empty(2, 4), I64.view(2, 4)),
        {aten.scatter_add.default: 2},
    ),
    "index": (lambda x, i: x[:, i], (torch.empty(2, 9), I64), {aten.index.Tensor: 9}),
    "index_put": (
        lambda x, i: torch.index_put(x, (i,), x.new_zeros(())),
        (torch.empty(4, 9), I64),
        {aten.index_put.default: 4},
    ),
    "index_select": (lambda x, i: x.index_select(1, i), (torch.empty(2, 9), I64), {aten.index_select.default: 9}),
    "max pool": (
        _pooled,
        (torch.empty(1, 2, 8, 8, requires_grad=True),),
        {aten.max_pool2d_with_indices_backward.default: 64},
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_in_range(name: str) -> None:
    function, tensors, expected = INDEXED[name]
    nodes = graph_of(function, *tensors)
    for target, limit in expected.items():
        node = find(nodes, target)
        limits = index_limits(node)
        assert list(limits.values()) == [limit]
        call = Maker(CPU).call(node)
        call()
        made = [
            value
            for value in torch.utils._pytree.tree_leaves((call.args, call.kwargs))
            if isinstance(value, torch.Tensor) and value.dtype == torch.int64
        ]
        assert made
        assert all(int(one.min()) >= 0 and limit // 2 <= int(one.max()) < limit for one in made)
    store = Store(None, CPU)
    measured(nodes, store)
    assert not store.failed


# ---- whole models ----


def transformers_models() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.zeros(2, 8, dtype=torch.int64)
    text = {"input_ids": ids, "labels": ids}
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, use_cache=False)
    bert = transformers.BertConfig(**small, intermediate_size=64)
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    images = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}
    return {
        "gpt2": (lambda: transformers.GPT2LMHeadModel(gpt2), text),
        "bert": (lambda: transformers.BertForMaskedLM(bert), text),
        "resnet": (lambda: transformers.ResNetForImageClassification(resnet), images),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet"])
def test_every_op_of_a_model_is_measured(name: str) -> None:
    build, batch = transformers_models()[name]
    nodes = step_nodes(build(), batch)
    store = Store(None, CPU)
    measured(nodes, store)
    assert not store.failed
    times = OpTimes(store, RATES)
    for node in nodes:
        expected = "measured" if is_op(node) and isinstance(node.target, torch._ops.OpOverload) else "roofline"
        assert times.source(node) == expected
        assert times.seconds(node) >= 0
        assert all(number >= 0 for number in flops_and_bytes(node))


def test_an_lstm_is_measured_with_the_workspace_that_its_own_kernel_makes() -> None:
    lstm = nn.LSTM(6, 6, batch_first=True)
    step = weft.compile(
        lstm, torch.optim.SGD(lstm.parameters(), lr=0.1), lambda model, batch: model(batch)[0].square().mean()
    )
    step.prepare(torch.randn(2, 3, 6))
    nodes = list(step.plan.programs["only"].graph.nodes)
    store = Store(None, CPU)
    measured(nodes, store)
    assert not store.failed


# ---- the roofline ----


def test_arithmetic_of_products_convolutions_and_attention_is_that_of_the_formulas() -> None:
    mm = find(graph_of(torch.mm, torch.empty(4, 5), torch.empty(5, 6)), aten.mm.default)
    assert flops_and_bytes(mm) == (2 * 4 * 5 * 6, 4 * (20 + 30 + 24))
    conv = find(
        graph_of(lambda x, w: F.conv2d(x, w, padding=1), torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)),
        aten.convolution.default,
    )
    assert flops_and_bytes(conv)[0] == 2 * 2 * 4 * 8 * 8 * 3 * 9
    heads = [torch.empty(2, 3, 16, 8, requires_grad=True) for _ in range(3)]

    def attention(*qkv: torch.Tensor) -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(*qkv).sum(), qkv)

    nodes = graph_of(attention, *heads)
    forward = find(nodes, aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = find(nodes, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    one_product = 2 * 2 * 3 * 16 * 16 * 8
    assert flops_and_bytes(forward)[0] == 2 * one_product
    assert flops_and_bytes(backward)[0] == 5 * one_product
    add = graph_of(lambda x: x + 1, torch.empty(10))[0]
    assert flops_and_bytes(add) == (10, 80)
    view = graph_of(lambda x: x.t(), torch.empty(2, 5))[0]
    assert flops_and_bytes(view) == (0, 0)


def test_a_form_of_an_op_that_no_formula_knows_is_estimated_all_the_same() -> None:
    node = graph_of(torch.mm, torch.empty(4, 5), torch.empty(5, 6))[0]
    node.args = (node.args[0],)
    assert flops_and_bytes(node)[0] == 24


def test_the_roofline_is_measured_once(tmp_path: Path) -> None:
    store = Store(tmp_path, CPU)
    rates = measure_roofline(CPU, store)
    store.save()
    assert rates.flops_per_second["float32"] > 1e8
    assert rates.bytes_per_second > 1e7
    assert 0 < rates.dispatch_seconds < 1e-2
    assert measure_roofline(CPU, Store(tmp_path, CPU)) == rates


# ---- the command ----

SCRIPT = """
import torch, weft
model = torch.nn.Linear(4, 3)
step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).sum())
print("compiled")
step(torch.randn(2, 4))
print("not reached")
"""


def test_the_command_measures_a_script_up_to_its_first_step_and_shows_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.cli.measure import BAD_INPUT, GOOD, measure_script, show_store

    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert measure_script([str(path)], tmp_path) == GOOD
    said = capsys.readouterr().out
    assert "compiled" in said
    assert "not reached" not in said
    assert "distinct ops of" in said
    assert show_store(tmp_path) == GOOD
    kept = len(Store(tmp_path, CPU).sections()["ops"])
    assert kept > 2
    assert f"ops: {kept} measured" in capsys.readouterr().out
    path.write_text("print(1)")
    assert measure_script([str(path)], tmp_path) == BAD_INPUT
    assert "never called a step" in capsys.readouterr().err
    assert measure_script([str(tmp_path / "missing.py")], tmp_path) == BAD_INPUT
