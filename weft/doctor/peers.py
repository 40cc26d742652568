"""Under torchrun: do all ranks answer, do collectives deliver the right numbers, how fast, on which hosts."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft._torch import all_gather
from weft.doctor.findings import Finding
from weft.doctor.machine import check_machine
from weft.doctor.network import check_network
from weft.report.plan import human_bytes

SIZES = (4 * 2**10, 2**20, 16 * 2**20)  # bytes of a message
SECONDS = 1.0  # for all measurements together
CLOCK_SKEW = 1.0  # seconds above which logs of several hosts are hard to read together


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_peers(timeout: float) -> tuple[list[Finding], bool]:
    """Everything there is to find on all ranks, and whether this rank is the one that prints it."""
    rank, world = int(os.environ["RANK"]), world_size()
    try:
        store = dist.PrefixStore("weft-doctor", _store(rank, world, timeout))
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        text = f"no answer from rank 0 at {where} within {timeout:g} s ({_first_line(error)})"
        advice = "see that it runs, that MASTER_ADDR is its host's address as seen from here, and that the port is open"
        return [*check_machine(), Finding("FAIL", "peers", text, advice)], True
    missing = _missing(store, "here", rank, world, timeout)
    if missing:
        named = ", ".join(map(str, missing))
        advice = "look at the output of these ranks and at their hosts: a process that did not start, or a firewall"
        text = f"no answer from rank{'s' * (len(missing) > 1)} {named} of {world} within {timeout:g} s"
        first = min(set(range(world)) - set(missing))
        return [*check_machine(), Finding("FAIL", "peers", text, advice)], rank == first
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    mine = [*check_machine(), *check_network(hosts)]
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (socket.gethostname(), mine))
        store.set(f"connected{rank}", "1")
        findings = [*everyone[0][1], *_of_others(everyone), _layout([host for host, _ in everyone])]
        findings += [_clocks(device), *_links(device, rank, world)]
        store.set(f"done{rank}", "1")
    except RuntimeError as error:
        return [*mine, _broken(store, rank, world, timeout, error)], rank == 0
    leave_group()
    return findings, rank == 0


def leave_group() -> None:
    """Let gloo's threads drop the tensors of the last collective first: at Python's exit that aborts the process."""
    if dist.is_initialized():
        time.sleep(0.2)
        dist.destroy_process_group()


def _store(rank: int, world: int, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR: torchrun's own, or rank 0's. PyTorch's way to it does not say which rank is missing."""
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _missing(store: dist.Store, what: str, rank: int, world: int, timeout: float) -> list[int]:
    """The ranks that do not say in the store that they have come this far."""
    store.set(f"{what}{rank}", "1")
    deadline = time.monotonic() + timeout
    missing = set(range(world))
    while missing and time.monotonic() < deadline:
        missing = {other for other in missing if not store.check([f"{what}{other}"])}
        time.sleep(0.02)
    return sorted(missing)


def _broken(store: dist.Store, rank: int, world: int, timeout: float, error: RuntimeError) -> Finding:
    """A collective failed: say who neither finished nor noticed, for that is whom the others waited for."""
    stage, silent = "answer", [other for other in range(world) if other != rank]
    with suppress(RuntimeError):  # the store goes with rank 0
        store.set(f"noticed{rank}", "1")
        deadline = time.monotonic() + min(timeout, 3.0)
        while silent and time.monotonic() < deadline:
            silent = [other for other in silent if not store.check([f"noticed{other}"])]
            silent = [other for other in silent if not store.check([f"done{other}"])]
            time.sleep(0.05)
        unconnected = [other for other in silent if not store.check([f"connected{other}"])]
        stage, silent = ("connect", unconnected) if unconnected else ("finish the test", silent)
    named = ", ".join(map(str, silent)) or "none, all noticed an error"
    advice = "see whether they still run, and that every host reaches every other on all ports (GLOO_SOCKET_IFNAME)"
    text = f"ranks that did not {stage} within {timeout:g} s: {named} ({_first_line(error)})"
    return Finding("FAIL", "peers", text, advice)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]


def _of_others(everyone: list[tuple[str, list[Finding]]]) -> list[Finding]:
    """What other ranks found that rank 0 did not say already."""
    said = {(finding.subject, finding.text) for finding in everyone[0][1]}
    found = []
    for rank, (host, findings) in enumerate(everyone[1:], 1):
        for finding in findings:
            differs = finding.subject in ("torch", "python") or finding.mark != "OK"
            if differs and (finding.subject, finding.text) not in said:
                said.add((finding.subject, finding.text))
                mark, advice = finding.mark, finding.advice
                if finding.subject == "torch":
                    mark, advice = "FAIL", "install the same PyTorch and weft on all hosts"
                found.append(Finding(mark, finding.subject, f"rank {rank} on {host}: {finding.text}", advice))
    return found


def _layout(hosts: list[str]) -> Finding:
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    shown = "; ".join(f"{host}: {', '.join(map(str, ranks))}" for host, ranks in by_host.items())
    uneven = len({len(ranks) for ranks in by_host.values()}) > 1
    advice = "the host with most ranks shares its link among them" if uneven else ""
    return Finding("warn" if uneven else "OK", "ranks", f"{len(hosts)}, by host: {shown}", advice)


def _clocks(device: torch.device) -> Finding:
    """The difference of the hosts' clocks: read right after a barrier, the smallest spread of several tries."""
    spreads = []
    for _ in range(5):
        dist.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=device)
        times = torch.empty(dist.get_world_size(), dtype=torch.float64, device=device)
        all_gather(times, now, dist.group.WORLD).wait()  # type: ignore[arg-type]
        spreads.append(float(times.max() - times.min()))
    skew = min(spreads)
    late = skew > CLOCK_SKEW
    return Finding(
        "warn" if late else "OK", "clocks", f"{1000 * skew:.1f} ms apart", "run an NTP client on all hosts" * late
    )


def _links(device: torch.device, rank: int, world: int) -> list[Finding]:
    findings: list[Finding] = []
    for test in (AllReduce, AllGather):
        shown = []
        for size in SIZES:
            seconds, right = _measure(test(size // 4, device, rank, world))
            verdict = torch.tensor([float(right)], device=device)
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
            if not verdict.item():
                advice = "do not train here: memory, a network card or its driver corrupts data"
                return [*findings, Finding("FAIL", test.name, f"wrong numbers at {human_bytes(size)}", advice)]
            moved = test.times * size * (world - 1) / world  # that a rank has to send
            rate = f"{1e6 * seconds:.0f} us" if size == SIZES[0] else f"{8e-9 * moved / seconds:.2f} Gbit/s"
            shown.append(f"{human_bytes(size)} {rate}")
        findings.append(Finding("OK", test.name, f"right; {', '.join(shown)} a rank"))
    return findings


class AllReduce:
    """An all-reduce whose result is known."""

    name, times = "all-reduce", 2  # a rank sends (world - 1) / world of the message so many times

    def __init__(self, count: int, device: torch.device, rank: int, world: int) -> None:
        ramp = torch.arange(count, device=device) % 1021
        self.mine = (ramp + rank).float()
        self.expected = (world * ramp + world * (world - 1) // 2).float()
        self.result = torch.empty_like(self.mine)

    def prepare(self) -> None:
        self.result.copy_(self.mine)

    def run(self) -> None:
        dist.all_reduce(self.result)


class AllGather:
    """An all-gather whose result is known."""

    name, times = "all-gather", 1

    def __init__(self, count: int, device: torch.device, rank: int, world: int) -> None:
        ramp = torch.arange(count // world, device=device) % 1021
        self.mine = (ramp + rank).float()
        self.expected = torch.cat([(ramp + other).float() for other in range(world)])
        self.result = torch.empty_like(self.expected)

    def prepare(self) -> None:
        self.result.zero_()

    def run(self) -> None:
        all_gather(self.result, self.mine, dist.group.WORLD).wait()  # type: ignore[arg-type]


def _measure(test: AllReduce | AllGather) -> tuple[float, bool]:
    """The fastest of a few rounds, as many on every rank, and whether the numbers were right in all of them."""
    device = test.mine.device
    right, fastest, spent = True, float("inf"), 0.0
    again = torch.ones(1, device=device)
    while again.item():
        test.prepare()
        dist.barrier()
        start = time.perf_counter()
        test.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        right &= torch.equal(test.result, test.expected)
        fastest, spent = min(fastest, seconds), spent + seconds
        again.fill_(spent < SECONDS / (2 * len(SIZES)))  # half a second of messages for each of the two collectives
        dist.broadcast(again, src=0)
    return fastest, right
