"""`weft lab --check`: what the emulated links really deliver."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from weft.lab.cluster import Lab, Shape
from weft.lab.errors import LabError

TOLERANCE = 0.05
KINDS = {"raw": "TCP, every host to the next one", "gloo": "gloo all-reduce, three in flight"}
TIMEOUT = 120.0


@dataclass(frozen=True)
class Rate:
    """What a host received, in Gbit/s: the packets on its link with their headers, and the payload in them."""

    wire: float
    payload: float


def measure(lab: Lab, kind: str, seconds: float) -> list[Rate]:
    """Keep all links busy with one kind of traffic, and read every host's rate."""
    hosts = lab.shape.hosts
    addresses = [lab.network.address(host) for host in range(hosts)]
    probe = str(Path(__file__).with_name("probe.py"))
    running = [
        lab.start(
            host,
            [sys.executable, probe, kind, str(host), str(hosts), str(seconds), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(hosts)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()  # "busy", or the end of a process that failed
    before, started = [lab.network.received(host) for host in range(hosts)], time.perf_counter()
    time.sleep(0.8 * seconds)
    after, taken = [lab.network.received(host) for host in range(hosts)], time.perf_counter() - started
    rates = []
    for host, process in enumerate(running):
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise LabError(f"host{host} measured its link ({kind}) for {TIMEOUT:g} s without an end") from None
        if process.returncode:
            raise LabError(f"host{host} could not measure its link ({kind}): {errors.strip()[-500:]}")
        rates.append(Rate(8e-9 * (after[host] - before[host]) / taken, 8e-9 * float(output)))
    return rates


def expected(kind: str, gbit: tuple[float, ...]) -> list[float]:
    """What each host should receive when all are busy: the slower of the two ends of its link decides."""
    if kind == "raw":
        return [min(rate, gbit[host - 1]) for host, rate in enumerate(gbit)]
    return [min(gbit)] * len(gbit)  # a ring is as fast as its slowest link


def check_links(shape: Shape, seconds: float = 3.0) -> bool:
    """Measure all links, print a table, and say whether every one is within five percent."""
    if shape.hosts < 2:
        raise LabError("one host has no link to measure: give --hosts 2 or more")
    good = True
    with Lab(shape) as lab:
        print(f"lab: {shape.describe()}")
        for kind, what in KINDS.items():
            for host, (rate, asked) in enumerate(
                zip(measure(lab, kind, seconds), expected(kind, shape.gbit), strict=True)
            ):
                off = rate.wire / asked - 1
                good = good and abs(off) <= TOLERANCE
                verdict = "ok" if abs(off) <= TOLERANCE else "OFF BY MORE THAN 5 %"
                print(
                    f"host{host}: {rate.wire:.3f} Gbit/s of {asked:g} ({off:+.1%}), of it {rate.payload:.3f} payload  "
                    f"{verdict}  [{what}]",
                    flush=True,
                )
    return good
