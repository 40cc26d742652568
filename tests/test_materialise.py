"""Models on the meta device: values by their own initialisation, `init=` or a checkpoint; planning without ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from tests.large import BUILDERS, Everything, Truncated, batch_for, on_meta, values_of
from weft.state import initial, safetensors
from weft.state.safetensors import Stored


def compiled(model: nn.Module, **options: Any) -> weft.Step:
    options = {"seed": 5, **options}
    return weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), options.pop("loss", None), **options)


def materialised(model: nn.Module, batch: Any, **options: Any) -> dict[str, torch.Tensor]:
    step = compiled(model, **options)
    step.prepare(batch)
    return values_of(step)


# ---- the model's own initialisation ----


@pytest.mark.parametrize("name", ["everything", "gpt2"])
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(name: str) -> None:
    one, two, other = (materialised(on_meta(name), batch_for(name), seed=seed) for seed in (5, 5, 6))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", BUILDERS)
def test_values_are_spread_as_those_of_a_model_that_was_built_for_real(name: str) -> None:
    found = materialised(on_meta(name), batch_for(name))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = BUILDERS[name]().state_dict()
    for key, value in found.items():
        if not value.is_floating_point() or not value.numel():
            assert torch.equal(value, expected[key])
            continue
        wanted = expected[key].float()
        assert value.dtype == expected[key].dtype
        assert value.stride() == expected[key].stride()
        if wanted.numel() == 1 or wanted.std() == 0:
            assert torch.equal(value.float(), wanted), key
        else:  # a mean of n numbers is off by 1/sqrt(n) of their spread
            tolerance = 6 * wanted.std() / wanted.numel() ** 0.5
            assert abs(value.float().mean() - wanted.mean()) < tolerance, key
            assert abs(value.float().std() - wanted.std()) < tolerance, key
            assert value.abs().max() < 3 * wanted.abs().max(), key


def transformers_model(name: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "ViT": lambda: transformers.ViTConfig(**sizes, image_size=32, patch_size=8),
        "Mixtral": lambda: transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=61),
        "T5": lambda: transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=61),
        "Mamba": lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=8),
        "ResNet": lambda: transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    }
    return getattr(transformers, f"{name}Model")(configs[name]())


@pytest.mark.parametrize("name", ["ViT", "Mixtral", "T5", "Mamba", "ResNet"])
def test_transformers_models_of_many_kinds_initialise_themselves(name: str) -> None:
    with torch.device("meta"):
        model = transformers_model(name)
    values = initial.Initialisation(
        model, None, device=torch.device("cpu"), seed=1, owned=lambda tensor: (0, model.get_parameter(tensor).numel())
    )
    expected = transformers_model(name).state_dict()
    for key, parameter in model.named_parameters():
        found, wanted = torch.empty(parameter.numel()), expected[key].float()
        values.fill(key, 0, found)
        tolerance = 6 * wanted.std(correction=0) / wanted.numel() ** 0.5 + 1e-6
        assert abs(found.mean() - wanted.mean()) < tolerance, key
        assert abs(found.std(correction=0) - wanted.std(correction=0)) < tolerance, key
    for key, buffer in model.named_buffers():
        if key in expected:
            assert torch.equal(buffer, expected[key])


def test_what_a_padding_row_an_orthogonal_matrix_and_a_truncated_normal_promise_holds() -> None:
    found = materialised(Everything.on_meta(), batch_for("everything"))
    assert not found["embedding.weight"][3].any()
    square = found["rotation.weight"] @ found["rotation.weight"].T
    assert torch.allclose(square, torch.eye(len(square)), atol=1e-5)
    assert found["truncated.weight"].abs().max() <= 0.04
    assert found["truncated.weight"].std() > 0.015
    assert torch.equal(found["computed.positions"], torch.arange(7.0).repeat(7, 1))
    assert torch.equal(found["computed.again"], found["computed.positions"] * 2)
    assert found["norm.running_var"].eq(1).all()
    assert found["computed.table"].tolist() == [0, 1, 2, 3, 4]


def test_random_numbers_do_not_repeat_from_chunk_to_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "CHUNK", 1000)
    model = nn.Sequential(nn.Linear(50, 200, device="meta"), nn.Linear(200, 50, device="meta"))
    found = materialised(model, torch.randn(2, 50), loss=lambda m, x: m(x).sum())
    chunks = torch.cat([found["0.weight"].flatten() * 50**0.5, found["1.weight"].flatten() * 200**0.5]).view(20, 1000)
    products = (chunks @ chunks.T) / 1000 * 3
    assert torch.allclose(products, torch.eye(20), atol=0.2)


def test_nothing_else_draws_other_numbers_and_the_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    one = materialised(Everything.on_meta(), batch_for("everything"))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    two = materialised(Everything.on_meta(), batch_for("everything"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_tensors_that_are_real_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].bias = nn.Parameter(torch.full((4,), 7.0))
    model[1].weight = nn.Parameter(torch.empty(4, device="meta"))
    model[1].running_mean.fill_(3)
    model.eval()
    kept = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    found = materialised(model, torch.randn(2, 4), loss=lambda m, x: m(x).sum())
    assert {"0.bias", "1.running_mean", "2.weight"} <= kept.keys()
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert found["0.weight"].std() > 0.1
    assert found["1.weight"].eq(1).all()


def test_it_trains_and_parameters_stay_the_objects_they_were() -> None:
    model = Everything.on_meta()
    parameters = list(model.parameters())
    parameters[0].mark = "kept"
    step = weft.compile(model, torch.optim.AdamW(parameters, lr=0.01), seed=1)
    losses = [float(step(batch_for("everything"))) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(one is two for one, two in zip(parameters, model.parameters(), strict=True))
    assert parameters[0].mark == "kept"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_frozen_parameters_on_meta_get_values_too() -> None:
    model = on_meta("gpt2")
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    plain = materialised(on_meta("gpt2"), batch_for("gpt2"))
    found = materialised(model, batch_for("gpt2"))
    assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_precision_keeps_masters_of_the_numbers_drawn() -> None:
    plain = materialised(on_meta("llama"), batch_for("llama"))
    model = on_meta("llama")
    step = compiled(model, precision=weft.Precision(compute=torch.bfloat16))
    step.prepare(batch_for("llama"))
    assert all(torch.equal(value, plain[key]) for key, value in values_of(step).items())


# ---- init= ----


class Bare(nn.Module):
    """A module that initialises in its constructor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale * self.mask).sum()


def bare() -> Bare:
    with torch.device("meta"):
        return Bare()


def test_what_nothing_initialises_is_an_error_that_names_it() -> None:
    step = compiled(bare())
    step.prepare(torch.randn(2, 4))
    with pytest.raises(initial.UninitialisedError, match=r"scale \(Bare\.scale, \[4\]\), mask \(Bare\.mask.*init="):
        step(torch.randn(2, 4))


def test_init_is_called_for_modules_with_meta_tensors_and_wins() -> None:
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module))
        if isinstance(module, Bare):
            nn.init.constant_(module.scale, 3.0)
            module.mask.copy_(torch.tensor([1.0, 0, 1, 0]))
        if isinstance(module, nn.Linear):
            module.bias.data.fill_(2.0)

    found = materialised(bare(), torch.randn(2, 4), init=init)
    assert set(seen) == {Bare, nn.Linear}
    assert found["scale"].eq(3).all()
    assert found["mask"].tolist() == [1, 0, 1, 0]
    assert found["linear.bias"].eq(2).all()
    assert found["linear.weight"].std() > 0.1  # its own


def test_an_initialisation_that_weft_does_not_call_is_an_error_that_names_it() -> None:
    class Model(Bare):
        def _init_weights(self, module: nn.Module) -> None: ...

    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match=r"_init_weights\(\).*init=model\._init_weights"):
        compiled(model)(torch.randn(2, 4))


def test_what_depends_on_other_tensors_values_sees_them() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            module.scale.data.copy_(module.linear.weight.sum(0))
            module.mask.copy_(module.linear.weight[0])
            if module.scale.sum() == 12345:  # a branch on a value
                raise AssertionError

    found = materialised(bare(), torch.randn(2, 4), init=init)
    assert torch.equal(found["scale"], found["linear.weight"].sum(0))
    assert torch.equal(found["mask"], found["linear.weight"][0])


def test_what_can_be_cut_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = []
    monkeypatch.setattr(initial.Initialisation, "_run", lambda self, call: run.append(call.path))
    for name in ("llama", "gpt2", "bert"):
        materialised(on_meta(name), batch_for(name))
    model = nn.Sequential(Truncated(4, 4, device="meta"), nn.LSTM(4, 4, device="meta"))
    materialised(model, torch.randn(2, 4), loss=lambda m, x: m(x)[0].sum())
    assert not run


def test_an_error_in_an_initialisation_is_the_users_own() -> None:
    def init(module: nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(bare(), init=init)(torch.randn(2, 4))


@pytest.mark.parametrize("data", [False, True])
def test_putting_a_new_tensor_in_a_parameters_place_is_an_error(data: bool) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            if data:
                module.scale.data = torch.ones(4)
            else:
                module.scale = nn.Parameter(torch.ones(4))
            module.mask.fill_(1)

    with pytest.raises(ValueError, match="in the place of scale"):
        compiled(bare(), init=init)(torch.randn(2, 4))


def test_init_as_a_function_is_ignored_with_a_warning_where_nothing_is_on_meta() -> None:
    with pytest.warns(UserWarning, match="ignored"):
        compiled(Bare(), init=lambda module: None)


# ---- from a checkpoint ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        BUILDERS["llama"]().save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def test_a_checkpoint_folder_gives_what_from_pretrained_gives(checkpoint: Path) -> None:
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM.from_pretrained(checkpoint)
    found = materialised(on_meta("llama"), batch_for("llama"), init=checkpoint)
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
    model = on_meta("llama")
    step = compiled(model, init=str(checkpoint))
    loss = step.evaluate(batch_for("llama"))
    assert torch.allclose(loss, expected(**batch_for("llama")).loss)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


def test_a_checkpoint_is_cast_and_loads_into_a_real_model_as_well(checkpoint: Path) -> None:
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model = BUILDERS["llama"]().to(torch.bfloat16)
    compiled(model, init=checkpoint)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in expected.state_dict().items())


def test_a_body_loads_from_the_checkpoint_of_its_model_and_the_other_way_round(tmp_path: Path) -> None:
    whole = BUILDERS["bert"]()
    whole.base_model.save_pretrained(tmp_path)
    named = {**dict(whole.base_model.named_parameters())}
    model = on_meta("bert")
    with pytest.raises(ValueError, match="lacks classifier"):
        compiled(model, init=tmp_path)
    tensors = {name: value.detach() for name, value in named.items()}
    tensors |= {f"classifier.{name}": value.detach() for name, value in whole.classifier.named_parameters()}
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    safetensors.write(tmp_path / "both.safetensors", kinds, tensors.values())
    found = materialised(on_meta("bert"), batch_for("bert"), init=tmp_path / "both.safetensors")
    assert all(torch.equal(found[key], value) for key, value in whole.state_dict().items())


def test_channels_last_weights_load_as_they_are_meant(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in model.state_dict().items()}
    safetensors.write(tmp_path / "conv.safetensors", kinds, model.state_dict().values())
    with torch.device("meta"):
        meta = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    image = torch.randn(1, 3, 8, 8)
    found = materialised(meta, image, loss=lambda m, x: m(x).sum(), init=tmp_path / "conv.safetensors")
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_what_does_not_fit_the_checkpoint_is_named_before_anything_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stored, "read", None)
    with torch.device("meta"):
        model = BUILDERS["llama"](num_hidden_layers=3, intermediate_size=48)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2.*mlp\.gate_proj\.weight is \[48, 32\].*\[64, 32\]"):
        compiled(model, init=checkpoint)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


@pytest.mark.parametrize(
    ("init", "match"),
    [
        (3, "init is a int"),
        (nn.Linear, "init is a type"),
        ("nowhere", "there is no such file or folder"),
        ("nowhere.safetensors", "there is no such file"),
    ],
)
def test_an_init_that_is_neither_function_nor_checkpoint_is_an_error(init: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compiled(bare(), init=init)


def test_a_folder_without_a_checkpoint_is_an_error_that_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ValueError, match=r"the folder holds weights\.bin"):
        compiled(bare(), init=tmp_path)


# ---- other refusals ----


def test_a_batch_on_another_device_is_an_error_that_names_both() -> None:
    batch = {"input_ids": batch_for("llama")["input_ids"].to("meta"), "labels": batch_for("llama")["labels"]}
    with pytest.raises(ValueError, match=r"batch\['input_ids'\] is on meta and the model is on cpu: move the batch"):
        compiled(on_meta("llama")).prepare(batch)


def test_a_plain_attribute_on_meta_is_an_error() -> None:
    class Model(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.ones(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.constant)

    with torch.device("meta"):
        model = Model()
    with pytest.raises(weft.TraceError, match="on the meta device that is neither a parameter nor a buffer"):
        compiled(model).prepare(torch.randn(2, 4))


def test_values_before_the_first_batch_are_an_error_that_says_what_to_do() -> None:
    step = compiled(on_meta("llama"))
    with pytest.raises(RuntimeError, match=r"step\.prepare"):
        step.state_dict()
    step.prepare(batch_for("llama"))
    assert torch.isfinite(step.state_dict()["model"]["lm_head.weight"]).all()


def test_an_optimizer_with_state_on_meta_is_an_error() -> None:
    model = on_meta("llama")
    with pytest.raises(ValueError, match="Adagrad holds"):
        weft.compile(model, torch.optim.Adagrad(model.parameters()))


# ---- planning without ranks ----


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_a_step_for_eight_ranks_is_planned_in_one_process_and_not_run() -> None:
    step = compiled(on_meta("llama"), mode="zero3")
    plan = step.prepare(batch_for("llama"))
    assert plan.layout.world == 8
    assert plan.gathers > 0
    assert "on 8 ranks" in plan.explain()
    for call in (step, step.evaluate):
        with pytest.raises(RuntimeError, match=r"can be planned with step\.prepare"):
            call(batch_for("llama"))
