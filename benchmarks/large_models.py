"""Models too big to build: how long and how much memory planning one takes, and what giving it its values takes.

    python -m benchmarks.large_models plan                      # a 70 B Llama for 32 ranks, in one process
    python -m benchmarks.large_models materialise --layers 8    # a cut of it, for real, on two processes

The model has the shapes of Llama 3 70B and is built on the meta device. `plan` uses PyTorch's fake process group, and
one core. `materialise` compares the peak memory of each process with the bytes of its shards; all of them must fit into
this machine's memory together.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(options: argparse.Namespace) -> nn.Module:
    """The model, without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=int(options.hidden * 3.5),
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(options.hidden // 1024, 1),
        vocab_size=options.vocabulary,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(DTYPES[options.dtype])


def compiled(options: argparse.Namespace) -> weft.Step:
    model = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return weft.compile(model, optimizer, mode=options.mode, seed=0, memory="100000GiB")


def batch_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, options.vocabulary, (1, options.length))
    return {"input_ids": ids, "labels": ids}


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{field} is not in /proc/self/status")


def plan(options: argparse.Namespace) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    build(argparse.Namespace(**{**vars(options), "layers": 1, "hidden": 1024}))  # imports, once
    start, cpu = time.perf_counter(), time.process_time()
    step = compiled(options)
    made = time.perf_counter()
    result = step.prepare(batch_of(options))
    end, cpu = time.perf_counter(), time.process_time() - cpu
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    program = result.programs["only"]
    print(f"{parameters / 1e9:.1f} B parameters, {options.dtype}, {options.mode}, {options.world} ranks")
    print(f"build and compile {made - start:.1f} s, prepare {end - made:.1f} s, together {end - start:.1f} s")
    print(f"on one core, {cpu:.1f} s of its time: the rest went to other processes")
    print(f"peak memory {gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}")
    print(f"{len(result.layout.buckets)} buckets, {len(program.graph.nodes)} nodes, {result.gathers} gathers a step")
    print(f"a rank keeps {gib(result.state_bytes)} between steps and {gib(result.arena_bytes)} of buffers within one")
    dist.destroy_process_group()


def materialise_rank(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.world)
    small = nn.Linear(8, 8)  # what is loaded once
    weft.compile(small, torch.optim.AdamW(small.parameters()), lambda m, x: m(x).sum())(torch.randn(2, 8))
    step = compiled(options)
    step.prepare(batch_of(options))
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    start = time.perf_counter()
    with torch.no_grad():
        executor = step._materialised()
    seconds = time.perf_counter() - start
    shards = sum(state.master.nbytes + (0 if state.full is None else state.full.nbytes) for state in executor.states)
    results.put((rank, shards, memory("VmHWM") - before, seconds))
    dist.barrier()
    dist.destroy_process_group()


def materialise(options: argparse.Namespace) -> None:
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=materialise_rank, args=(rank, options, f"{folder}/store", results))
            for rank in range(options.world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")
    for rank, shards, peak, seconds in sorted(results.get() for _ in processes):
        print(
            f"rank {rank}: shards {gib(shards)}, peak memory of materialising {gib(peak)} ({peak / shards:.3f} of its "
            f"shards), {seconds:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "materialise"))
    parser.add_argument("--layers", type=int, help="80 to plan, 8 to materialise")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--world", type=int, help="32 to plan, 2 to materialise")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--mode", default="zero3")
    options = parser.parse_args()
    options.layers = options.layers or (80 if options.what == "plan" else 8)
    options.world = options.world or (32 if options.what == "plan" else 2)
    (plan if options.what == "plan" else materialise)(options)


if __name__ == "__main__":
    main()
