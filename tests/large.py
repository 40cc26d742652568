"""Models for the tests of materialising, with what initialisations do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import weft


class Computed(nn.Module):
    """Values that are copied from computed ones, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(7, 7))
        self.again = nn.Parameter(torch.empty(7, 7))
        self.register_buffer("table", torch.empty(5, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.positions.copy_(torch.arange(7.0).expand(7, 7))
            self.again.copy_(self.positions * 2)
            self.table.copy_(torch.arange(5))


class Orthogonal(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.uniform_(self.bias, -1, 1)


class Truncated(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.04, b=0.04)


class Everything(nn.Module):
    """Padding, batch norm, attention, a convolution in another memory format, ties, an LSTM, computed values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 24, padding_idx=3)
        self.norm = nn.BatchNorm1d(24)
        self.rotation = Orthogonal(24, 24)
        self.truncated = Truncated(24, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.lstm = nn.LSTM(24, 12, batch_first=True)
        self.computed = Computed()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(12, 12)
        self.tied_again = nn.Linear(12, 12)
        self.tied_again.weight = self.tied.weight
        self.head = nn.Linear(12, 61)

    @classmethod
    def on_meta(cls) -> Everything:
        with torch.device("meta"):
            model = cls()
        model.conv.to(memory_format=torch.channels_last)
        return model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids).flatten(0, 1)).view(*ids.shape, -1)
        x = self.truncated(torch.tanh(self.rotation(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x[:, None]).mean(1)
        x = self.tied_again(self.tied(self.lstm(x)[0]))
        extra = (self.computed.positions * self.computed.again).mean() * self.computed.table.sum() * 1e-3
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + extra * 1e-3


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 61, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 61}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, use_cache=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **drop, vocab_size=61, max_position_embeddings=32))


BUILDERS: dict[str, Callable[..., nn.Module]] = {"everything": Everything, "llama": llama, "gpt2": gpt2, "bert": bert}


def on_meta(name: str) -> nn.Module:
    if name == "everything":
        return Everything.on_meta()
    with torch.device("meta"):
        return BUILDERS[name]()


def batch_for(name: str, rank: int = 0) -> Any:
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(rank))
    if name == "everything":
        return (ids,)
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if name == "bert" else ids}


def values_of(step: weft.Step) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, as the model holds them."""
    with step.gathered() as model, torch.no_grad():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}
