"""What is trained: models that users know, unmodified, in sizes for two cores and an ordinary network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = Any
# "small" is for trying things out; in "base" communication takes about as long as compute at 1 Gbit/s.
SIZES = ("small", "base")


@dataclass(frozen=True)
class Workload:
    """A model with its data and loss.

    Attributes:
        build: the model; its argument is the dropout probability.
        batch: one rank's batch, in which `loss` finds what it needs.
        blocks: names of the classes that FSDP2 shards and compiles apart: what its guide calls a transformer block.
        dropout: the probability used in timed steps; comparisons of losses run without.
    """

    build: Callable[[float], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    blocks: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = field(default=lambda model, batch: model(**batch).loss)
    dropout: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a step does beside forward, backward and update.

    Attributes:
        clip: the global gradient norm to clip to; None: no clipping.
        accumulate: micro-batches a step; its loss is their mean.
    """

    clip: float | None = None
    accumulate: int = 1


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for every contestant; fused is the fastest that PyTorch has on CPUs."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


# ---- data: random, since only its shape matters here ----


def text(size: int, length: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (size, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make


def images(size: int, side: int, classes: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        pixels = torch.randn(size, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (size,), generator=generator)}

    return make


def pairs(size: int, length: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        ids = torch.randint(4, vocabulary, (2, size, length), generator=generator)
        return {"input_ids": ids[0], "labels": ids[1]}

    return make


# ---- models ----


def transformers_model(
    kind: str, config: Mapping[str, Any], dropouts: tuple[str, ...] = ()
) -> Callable[[float], nn.Module]:
    """A `transformers` class by name; `dropouts` are its configuration's names for dropout probabilities."""

    def build(dropout: float) -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind)
        settings: dict[str, Any] = {"use_cache": False} if "vocab_size" in config else {}
        settings.update(config)
        for name in dropouts:
            settings[name] = dropout
        return model_class(model_class.config_class(**settings)).train()

    return build


def gpt(width: int, layers: int, heads: int, length: int, vocabulary: int) -> Callable[[float], nn.Module]:
    """The model of examples/gpt.py."""

    def build(_dropout: float) -> nn.Module:
        sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
        from gpt import GPT

        return GPT(width, layers, heads, length, vocabulary=vocabulary)

    return build


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class VGG(nn.Module):
    """VGG-19's convolutions with batch norm; the classifier is narrower, since images are smaller."""

    STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))

    def __init__(self, scale: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in self.STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(channels, width // scale, 3, padding=1), nn.BatchNorm2d(width // scale), nn.ReLU()]
                channels = width // scale
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(pixel_values).flatten(1))


class RecurrentLM(nn.Module):
    """A 2-layer LSTM language model."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def classification(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def decoder(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }


BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BLOCKS = {
    "gpt": ("Block",),
    "llama": ("LlamaDecoderLayer",),
    "bert": ("BertLayer",),
    "mixtral": ("MixtralDecoderLayer",),
    "resnet": ("ResNetStage",),
    "vgg": ("Sequential",),
    "lstm": ("LSTM", "Embedding", "Linear"),
    "seq2seq": ("BartEncoderLayer", "BartDecoderLayer"),
}
NAMES = tuple(BLOCKS)


def workload(name: str, size: str) -> Workload:
    """A workload by name and size."""
    small, blocks = size == "small", BLOCKS[name]
    if name == "gpt":
        build = gpt(128, 3, 2, 64, 512) if small else gpt(384, 6, 6, 256, 2048)
        return Workload(build, text(2, 64, 512) if small else text(2, 256, 2048), blocks, next_token)
    if name == "llama":
        config = {**decoder(128, 3, 512), "intermediate_size": 344}
        if not small:
            config = {**decoder(384, 6, 4096), "intermediate_size": 1024}
        batch = text(2, 64, 512) if small else text(2, 192, 4096)
        return Workload(transformers_model("LlamaForCausalLM", config), batch, blocks)
    if name == "bert":
        config = {**decoder(128, 3, 512), "intermediate_size": 512}
        if not small:
            config = {**decoder(384, 6, 4096), "intermediate_size": 1536}
        config["attn_implementation"] = "eager"
        build = transformers_model("BertForMaskedLM", config, BERT_DROPOUTS)
        return Workload(build, text(2, 64, 512) if small else text(4, 96, 4096), blocks, dropout=0.1)
    if name == "mixtral":
        config = {**decoder(128, 2, 512), "intermediate_size": 128, "num_local_experts": 4}
        if not small:
            config = {**decoder(256, 4, 2048), "intermediate_size": 448, "num_local_experts": 8}
        config |= {"num_key_value_heads": 2, "experts_implementation": "batched_mm"}
        build = transformers_model("MixtralForCausalLM", config)
        return Workload(build, text(1, 32, 512) if small else text(1, 40, 2048), blocks)
    if name == "resnet":
        shape = {"embedding_size": 16, "hidden_sizes": [64, 128], "depths": [1, 2]} if small else {}
        build = transformers_model("ResNetForImageClassification", {**shape, "num_labels": 100})
        return Workload(build, images(4, 32, 100) if small else images(8, 64, 100), blocks)
    if name == "vgg":
        scale, hidden = (8, 64) if small else (1, 512)
        return Workload(
            lambda _dropout: VGG(scale, hidden, 100),
            images(4, 32, 100) if small else images(16, 32, 100),
            blocks,
            classification,
        )
    if name == "lstm":
        vocabulary, width = (512, 64) if small else (4096, 640)
        return Workload(lambda _dropout: RecurrentLM(vocabulary, width), text(4, 32, vocabulary), blocks, next_token)
    if name == "seq2seq":
        width, layers, vocabulary = (128, 1, 512) if small else (384, 3, 4096)
        config = {
            "vocab_size": vocabulary,
            "d_model": width,
            "encoder_layers": layers,
            "decoder_layers": layers,
            "encoder_attention_heads": width // 64,
            "decoder_attention_heads": width // 64,
            "encoder_ffn_dim": 4 * width,
            "decoder_ffn_dim": 4 * width,
            "max_position_embeddings": 256,
        }
        build = transformers_model("BartForConditionalGeneration", config, ("dropout",))
        return Workload(build, pairs(2, 32, vocabulary) if small else pairs(4, 96, vocabulary), blocks, dropout=0.1)
    raise ValueError(f"unknown workload {name!r}: use one of {', '.join(NAMES)}")
