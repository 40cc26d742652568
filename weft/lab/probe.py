"""Runs on a lab's hosts to keep links busy; a script of its own, so that raw sockets need no PyTorch.

    probe.py raw RANK HOSTS SECONDS ADDRESS...      every host sends to the next one, all at once
    probe.py gloo RANK HOSTS SECONDS ADDRESS...     gloo all-reduces over all hosts, three in flight

Prints `busy` once the link is in its steady state, goes on for SECONDS, and prints how many bytes of payload a second
this host received meanwhile.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 29600
CHUNK = 1 << 20
IN_FLIGHT = 3
SETTLING = 0.5  # seconds: what the limiter's bucket lets through at once at the start is not the link's rate


def raw(rank: int, hosts: int, seconds: float, addresses: list[str]) -> float:
    """TCP from every host to the next one; the rate is taken at the receiver."""
    server = socket.create_server((addresses[rank], PORT))

    def send() -> None:
        while True:
            try:
                connection = socket.create_connection((addresses[(rank + 1) % hosts], PORT), timeout=30)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        block = bytes(CHUNK)
        end = time.perf_counter() + seconds + 3 * SETTLING
        while time.perf_counter() < end:
            connection.sendall(block)
        connection.close()

    sender = threading.Thread(target=send)
    sender.start()
    server.settimeout(60)
    connection, _ = server.accept()
    buffer = bytearray(CHUNK)
    settled = time.perf_counter() + SETTLING
    while time.perf_counter() < settled:
        connection.recv_into(buffer)
    print("busy", flush=True)
    total, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        total += connection.recv_into(buffer)
    while connection.recv_into(buffer):
        pass  # until the sender is done, so that it ends without an error
    sender.join()
    return total / (now - started)


def gloo(rank: int, hosts: int, seconds: float, addresses: list[str]) -> float:
    """All-reduces of 4 MiB over all hosts, three in flight: in a ring every link is busy in both directions."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{addresses[0]}:{PORT + 1}",
        rank=rank,
        world_size=hosts,
        timeout=timedelta(seconds=60),
    )
    groups = [dist.new_group() for _ in range(IN_FLIGHT)]
    tensors = [torch.zeros(1 << 20) for _ in groups]
    works: list[dist.Work | None] = [None] * IN_FLIGHT

    def reduce(count: int) -> float:
        """Run so many, and return the seconds that they took."""
        dist.barrier()
        started = time.perf_counter()
        for index in range(count):
            slot = index % IN_FLIGHT
            if (work := works[slot]) is not None:
                work.wait()
            works[slot] = dist.all_reduce(tensors[slot], group=groups[slot], async_op=True)
        for work in works:
            if work is not None:
                work.wait()
        return time.perf_counter() - started

    trial = torch.tensor(reduce(2 * IN_FLIGHT) / (2 * IN_FLIGHT))
    dist.all_reduce(trial, op=dist.ReduceOp.MAX)  # all ranks do the same number
    print("busy", flush=True)
    count = max(IN_FLIGHT, round((seconds + SETTLING) / trial.item()))
    taken = reduce(count)
    dist.destroy_process_group()
    return count * tensors[0].nbytes * 2 * (hosts - 1) / hosts / taken


if __name__ == "__main__":
    kind, number, world, length, *places = sys.argv[1:]
    rate = {"raw": raw, "gloo": gloo}[kind](int(number), int(world), float(length), places)
    print(rate, flush=True)
