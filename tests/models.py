"""Small models that between them do everything that tracing must get right, with their data and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class TiedGPT(nn.Module):
    """Tied embedding and head, dropout."""

    def __init__(self, dropout: float = 0.1, checkpointed: bool = False, width: int = 20, layers: int = 2) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LoRA(nn.Module):
    """Frozen base weights with trained low-rank additions, and weights used through a cast and `1 + w`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        for parameter in self.layers.parameters():
            parameter.requires_grad_(False)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(12, 2) * 0.3) for _ in range(3))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(2, 12) * 0.3) for _ in range(3))
        self.scale = nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + x @ down @ up) * (1 + self.scale)
        return F.mse_loss(x, y)


class PartlyUsed(nn.Module):
    """Parameters that a loss does not reach: one head is trained at a time, by a plain value in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 7)
        self.heads = nn.ModuleDict({"a": nn.Linear(7, 3), "b": nn.Linear(7, 3)})
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.heads[head](torch.relu(self.body(x))).square().mean()


class ConvNet(nn.Module):
    """Batch norm, counters in place and rebound, in-place ops on views, channels_last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=2)
        self.bn2 = nn.BatchNorm2d(5, momentum=0.3)
        self.head = nn.Linear(5, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(5))
        self.conv2.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu_()
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = x.mean((2, 3))
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        x = x.clone()
        x[:, 0] = 0.5
        x[:, 1].mul_(2)
        return F.cross_entropy(self.head(x), y)


class ClippedIdentity(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward, nor linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-0.01, 0.01) * (x.abs() < 1)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(ClippedIdentity.apply(self.first(x))).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 11, num_layers=2, batch_first=True)
        self.head = nn.Linear(11, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(ids))[0][:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Tiny(nn.Module):
    """Fewer elements than a slice's alignment; a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.pair = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.pair).sum(-1) * self.scalar - 1).square().mean() + self.empty.sum()


Batch = Any


@dataclass(frozen=True)
class Case:
    """A model with everything that a test needs to train it."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Batch], Any] | None = None
    scheduler: bool = False
    second_batch: Callable[[torch.Generator], Batch] | None = None  # every other step: another signature


def ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 10), generator=generator)


def numbers(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float64)


def pair(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {"x": numbers(*shape)(generator), "y": numbers(*shape)(generator)}


def image(generator: torch.Generator) -> Batch:
    return numbers(4, 3, 8, 8)(generator), torch.randint(0, 4, (4,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # An eps above rounding noise: a gradient that is zero but for rounding (an attention's key bias) would otherwise
    # be scaled up to a step of full size, in eager as well.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def sgd_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.05, momentum=0.9, nesterov=True
    )


def loss_with_extras(model: nn.Module, batch: Batch) -> Any:
    loss = model(batch)
    penalty = sum(p.square().sum() for p in model.parameters())
    return loss + 1e-3 * penalty, {"raw": loss, "name": "raw", "head": model.head.weight[0]}


CASES: dict[str, Case] = {
    "tied_gpt": Case(TiedGPT, ids, adamw, scheduler=True),
    "checkpointed_gpt": Case(lambda: TiedGPT(checkpointed=True), ids, sgd_groups),
    "extras": Case(TiedGPT, ids, adamw, loss=loss_with_extras),
    "lora": Case(
        LoRA, pair(3, 12), lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-6), loss=lambda m, b: m(**b)
    ),
    "partly_used": Case(
        PartlyUsed,
        lambda g: (numbers(3, 10)(g), "a"),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
        second_batch=lambda g: (numbers(3, 10)(g), "b"),
    ),
    "conv": Case(ConvNet, image, sgd_groups),
    "quantised": Case(Quantised, numbers(4, 9), lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5)),
    "lstm": Case(Recurrent, lambda g: ids(g)[:, :5], lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2)),
    "tiny": Case(Tiny, numbers(3, 2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
}


# Where names are looked up; tests/ecosystem.py adds to it.
REGISTRY = dict(CASES)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A case's model, with the same values on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return REGISTRY[name].build().to(dtype)


def batches(name: str, rank: int, step: int, count: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """A rank's micro-batches of one step."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    case = REGISTRY[name]
    make = case.second_batch if case.second_batch and step % 2 else case.batch
    seeds = [1000 * rank + 10 * step + index for index in range(count)]
    return [torch.utils._pytree.tree_map(cast, make(torch.Generator().manual_seed(seed))) for seed in seeds]
