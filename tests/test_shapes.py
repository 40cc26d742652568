"""Batches whose sizes vary: few traces, right results for every shape, and a warning where it cannot work."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.reference import relative_error
from weft.trace.capture import default_loss

Model = nn.Module
LENGTHS = ((2, 16), (2, 33), (2, 64), (2, 200), (5, 17), (3, 40), (2, 33))


class Counted:
    """A compiled step that counts its traces, beside the same model trained by plain PyTorch."""

    def __init__(self, model: Model, loss: Callable[..., Any] | None = None, seed: int = 3, **options: Any) -> None:
        self.reference = copy.deepcopy(model)
        self.loss = loss or default_loss
        # Not Adam: it blows up the noise in gradients that are zero, such as those of a key's bias.
        self.plain = torch.optim.SGD(self.reference.parameters(), lr=0.1, momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.step = weft.compile(model, optimizer, loss, seed=seed, **options)
        self.model = model
        self.random = torch.Generator().manual_seed(seed).get_state()
        self.traces = 0
        capture = self.step._capture

        def counting(*arguments: Any) -> Any:
            self.traces += 1
            return capture(*arguments)

        self.step._capture = counting  # type: ignore[method-assign]

    def __call__(self, batch: Any) -> float:
        """One step of both; the largest difference in losses and parameters, relative to the values."""
        found = self.step(copy.deepcopy(batch))
        outer = torch.get_rng_state()
        torch.set_rng_state(self.random)
        expected = self.loss(self.reference, batch)
        self.plain.zero_grad()
        expected.backward()
        self.plain.step()
        self.random = torch.get_rng_state()
        torch.set_rng_state(outer)
        pairs = [(found, expected), *zip(self.model.parameters(), self.reference.parameters(), strict=True)]
        return max(relative_error(a.detach(), b.detach()) for a, b in pairs)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows * 1000 + length))


def causal(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Recurrent(Model):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.cell = kind(8, 12, batch_first=True)
        self.head = nn.Linear(12, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.head(self.cell(self.embedding(ids))[0])
        return F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Attention(Model):
    """Two blocks with dropout, one of them checkpointed, and positions by slicing a buffer."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.register_buffer("positions", torch.randn(256, 16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.positions[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        h = self.blocks[0](h, mask, is_causal=True)
        h = checkpoint(self.blocks[1], h, mask, use_reentrant=False)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Pictures(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3))).square().mean()


def hugging_face(name: str) -> Model:
    import transformers as t

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2))
    if name == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0))
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**small, intermediate_size=64))
    if name == "t5":
        return t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
        )
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_a_transformer_trains_on_any_length_with_three_traces(name: str) -> None:
    counted = Counted(hugging_face(name).double())
    for rows, length in LENGTHS if name != "t5" else LENGTHS[:4]:
        assert counted(causal(rows, length)) < 1e-12, (rows, length)
    assert counted.traces <= 3


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_model_is_right_for_every_length(kind: type[nn.Module]) -> None:
    counted = Counted(Recurrent(kind).double())
    for rows, length in ((2, 5), (2, 8), (3, 11)):
        assert counted((tokens(rows, length),)) < 1e-12, (rows, length)


def test_slices_of_one_tensor_with_dropout_and_checkpointing_share_a_trace() -> None:
    counted = Counted(Attention().double())
    for rows, length in LENGTHS:
        ids = tokens(rows, length + 1)
        assert counted((ids[:, :-1], ids[:, 1:])) < 1e-12, (rows, length)
    assert counted.traces <= 3


def test_pictures_of_any_size_share_a_trace() -> None:
    counted = Counted(Pictures().double())
    for rows, side in ((2, 32), (2, 48), (3, 40), (4, 64), (7, 33)):
        assert counted((torch.randn(rows, 3, side, side + 8, dtype=torch.float64),)) < 1e-11, (rows, side)
    assert counted.traces <= 3


class Branching(Model):
    """Does one thing to short batches and another to long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.short if x.shape[0] < 10 else self.long
        return chosen(x).square().sum() / x.shape[0]


def test_a_branch_on_a_size_is_guarded() -> None:
    counted = Counted(Branching().double(), mode="replicate")
    for rows in (4, 5, 6, 12, 30, 7, 11, 9, 10):
        assert counted((torch.randn(rows, 4, dtype=torch.float64),)) < 1e-12, rows
    assert counted.traces <= 4


def test_a_batch_of_one_is_traced_by_itself() -> None:
    counted = Counted(Branching().double())
    for rows in (4, 5, 1, 1, 6):
        assert counted((torch.randn(rows, 4, dtype=torch.float64),)) < 1e-12, rows
    assert counted.traces == 3


def test_sizes_that_happen_to_be_equal_stay_independent() -> None:
    def loss(model: Model, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean() + batch[1].sum()

    counted = Counted(nn.Linear(4, 4).double(), loss)
    for first, second in ((3, 5), (7, 7), (8, 3), (2, 9)):
        batch = [torch.randn(first, 4, dtype=torch.float64), torch.randn(second, dtype=torch.float64)]
        assert counted(batch) < 1e-12
    assert counted.traces == 2


def test_every_shape_seen_before_costs_no_trace() -> None:
    counted = Counted(Branching().double())
    for rows in (4, 5, 6):
        counted((torch.randn(rows, 4, dtype=torch.float64),))
    before = counted.traces
    for rows in (6, 4, 5, 8, 9, 3):
        counted((torch.randn(rows, 4, dtype=torch.float64),))
    assert counted.traces == before == 2


def test_evaluation_takes_any_shape_too() -> None:
    counted = Counted(hugging_face("llama").double())
    counted(causal(2, 16))
    for rows, length in LENGTHS:
        batch = causal(rows, length)
        with torch.no_grad():
            expected = counted.reference(**batch).loss
        assert abs(counted.step.evaluate(batch) - expected) < 1e-12
    assert counted.traces <= 4  # one to train, three to evaluate


def test_micro_batches_of_different_lengths_share_a_trace() -> None:
    model = hugging_face("llama").double()
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = weft.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3)
    for lengths in ((16, 20, 31), (40, 17, 16)):
        batches = [causal(2, length) for length in lengths]
        step(batches)
        plain.zero_grad()
        for batch in batches:
            reference(**batch).loss.backward()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3
        plain.step()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert relative_error(mine.detach(), theirs.detach()) < 1e-12


class Frozen(Model):
    """Takes a size out of the batch in a way that fixes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = {rows: 1.0 / rows for rows in range(1, 100)}
        return (x @ self.weight).sum() * table[int(x.shape[0])]


def test_a_size_that_the_model_fixes_warns_once_and_names_what_varies() -> None:
    counted = Counted(Frozen().double(), lambda model, batch: model(batch["picture"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(4, 30):
            assert counted({"picture": torch.randn(rows, 4, dtype=torch.float64), "note": 1}) < 1e-12
    texts = [str(warning.message) for warning in caught if "traced anew" in str(warning.message)]
    assert len(texts) == 1
    assert "size(0) of batch['picture'] (" in texts[0]
    assert "note" not in texts[0]


def test_a_number_that_changes_with_every_batch_is_named() -> None:
    counted = Counted(nn.Linear(4, 4).double(), lambda model, batch: model(batch["x"]).sum() * batch["weight"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            counted({"x": torch.randn(3, 4, dtype=torch.float64), "weight": float(number)})
    texts = [str(warning.message) for warning in caught if "traced anew" in str(warning.message)]
    assert len(texts) == 1
    assert "batch['weight']" in texts[0]
    assert "batch['x']" not in texts[0]


def test_a_few_new_shapes_now_and_then_do_not_warn() -> None:
    counted = Counted(Branching().double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(2, 40):
            counted((torch.randn(rows, 4, dtype=torch.float64),))


def test_a_schedule_in_a_module_attribute_does_not_undo_open_sizes() -> None:
    model = Branching().double()
    counted = Counted(model)
    for number, rows in enumerate((4, 5, 6, 7, 8, 9)):
        model.calls = number  # type: ignore[assignment]  # nothing reads it
        assert counted((torch.randn(rows, 4, dtype=torch.float64),)) < 1e-12
    assert counted.traces <= 4
