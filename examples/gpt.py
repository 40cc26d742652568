"""Train a byte-level GPT on the source of Python's standard library, on as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/gpt.py --seconds 60 --checkpoint out/checkpoint

One file, to be read from top to bottom: model, data, training loop. The lines that make it distributed, and that let it
go on after it was stopped or killed, are those with `weft` in them.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import weft


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict every byte from those before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def standard_library() -> torch.Tensor:
    """The text that every machine with Python has, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: torch.Tensor, size: int, length: int, step: int, rank: int) -> torch.Tensor:
    """Random windows, other ones in every step and on every rank: a run that goes on sees what it would have seen."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(0, len(text) - length - 1, (size,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts])


class Interrupt:
    """Ctrl-C ends the training after the current step; a second one ends the process."""

    def __init__(self) -> None:
        self.seen = False
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, _signal: int, _frame: object) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


def any_rank(flag: bool, device: torch.device | str, world: int) -> bool:
    """Whether a flag is set on any rank, so that all ranks stop at the same step."""
    if world == 1:
        return flag
    found = torch.tensor(float(flag), device=device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return bool(found)


def save_curve(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.figure(figsize=(7, 4))
    pyplot.plot(range(1, len(losses) + 1), losses)
    pyplot.xlabel("step")
    pyplot.ylabel("training loss (nats per byte)")
    pyplot.grid(alpha=0.3)
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="train for about this long")
    parser.add_argument("--steps", type=int, default=None, help="train for this many steps instead")
    parser.add_argument("--mode", default="auto", help="auto, replicate, zero1, zero2 or zero3")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--checkpoint", type=Path, default=None, help="folder to go on from, and to save to")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one save to the next")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the loss curve goes")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    interrupt = Interrupt()
    console = Console(quiet=rank > 0)
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"

    text = standard_library()
    held_out = len(text) // 20

    torch.manual_seed(0)
    model = GPT(args.width, args.layers, args.heads, args.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    step = weft.compile(model, optimizer, loss, mode=args.mode, clip_norm=1.0)

    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{count / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {world} process(es)")
    losses: list[float] = []  # rank 0's, from the first step on
    before = 0.0  # seconds of training before this start
    if args.checkpoint and (args.checkpoint / "checkpoint.json").exists():
        extra = weft.load(step, args.checkpoint)
        losses, before = extra["losses"], extra["seconds"]
        schedule.load_state_dict(extra["schedule"])
        console.print(f"going on from step {step.steps} in {args.checkpoint}")

    def save(background: bool) -> None:
        if args.checkpoint:
            extra = {"losses": losses, "seconds": before + elapsed, "schedule": schedule.state_dict()}
            weft.save(step, args.checkpoint, extra, background=background)

    elapsed, first = 0.0, step.steps
    step.prepare(batch(text[:-held_out], args.batch, args.length, step.steps, rank).to(device))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total = float(args.steps or args.seconds)
        task = progress.add_task("compiling", total=total, rate="")
        tokens, started = args.batch * args.length * world, time.perf_counter()
        while True:
            done = step.steps >= args.steps if args.steps else before + elapsed >= args.seconds
            if any_rank(done or (interrupt.seen and len(losses) > 0), device, world):
                break
            losses.append(step(batch(text[:-held_out], args.batch, args.length, step.steps, rank).to(device)).item())
            schedule.step()
            if step.steps == first + 1:
                started = time.perf_counter()  # the first step compiles
            elapsed = time.perf_counter() - started
            rate = tokens * (step.steps - first - 1) / elapsed if elapsed > 0 else 0.0
            progress.update(
                task,
                completed=step.steps if args.steps else min(before + elapsed, total),
                description=f"step {step.steps}, loss {losses[-1]:.3f}",
                rate=f"{rate:,.0f} tokens/s",
            )
            if step.steps % args.save_every == 0:
                save(background=True)
    save(background=False)
    finished = not any_rank(interrupt.seen, device, world)

    evaluation = [batch(text[-held_out:], args.batch, args.length, index, rank).to(device) for index in range(10)]
    found = torch.stack([step.evaluate(windows) for windows in evaluation]).mean()
    if world > 1:
        torch.distributed.all_reduce(found)
        found /= world
    if rank == 0:
        save_curve(losses, args.out / "loss.png")
    console.print(step.plan.explain(), highlight=False)
    console.print(
        f"evaluation loss {found:.3f} nats per byte ({found / math.log(2):.2f} bits), "
        f"training {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; curve in {args.out / 'loss.png'}"
    )
    if rank == 0 and args.checkpoint and finished:  # the next run starts afresh
        kept = args.checkpoint.with_name(args.checkpoint.name + "-finished")
        shutil.rmtree(kept, ignore_errors=True)
        args.checkpoint.rename(kept)
        console.print(f"the finished training is kept in {kept}")
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
