"""Is the simulation right? Plans of several workloads, simulated and then measured on emulated hosts.

    python -m benchmarks.prediction                                    four workloads at 0.5 and 1 Gbit/s
    python -m benchmarks.prediction --workloads gpt --gbit 1 --size small --steps 4

Every plan runs in processes of its own, one on each of two hosts. What weft measures of ops and network starts anew at
each speed, and a step of every workload runs once before, so that ops are known as they are within a step. Results go
to out/bench/prediction.json, or with --record to benchmarks/results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.__main__ import chosen
from benchmarks.report import machine, versions
from benchmarks.rounds import ROOT, Failed, Team
from benchmarks.workloads import NAMES, SIZES
from weft.cli.main import parse_speeds
from weft.lab.cluster import Lab, Shape
from weft.lab.errors import LabError

HOSTS = 2
PORT = 29900
MIB = 2**20


@dataclass(frozen=True)
class Asked:
    """A plan, as a user asks for it."""

    mode: str
    passes: Mapping[str, Any]
    memory: str | None = None


PLANS: dict[str, Asked] = {
    "replicate": Asked("replicate", {}),
    "zero1": Asked("zero1", {}),
    "zero1, no prefetch": Asked("zero1", {"prefetch": False}),
    "zero1, buckets of 1 MiB": Asked("zero1", {"shard": {"bucket_bytes": MIB}}),
    "zero2, buckets of 16 MiB": Asked("zero2", {"shard": {"bucket_bytes": 16 * MIB}}),
    "zero3": Asked("zero3", {}),
    "zero3, no prefetch": Asked("zero3", {"prefetch": False}),
    "zero3, gathered earliest": Asked("zero3", {"prefetch": {"rule": "earliest"}, "unshard": False}, "4GiB"),
}


@dataclass(frozen=True)
class Row:
    """One plan of one workload at one speed: the slowest rank's seconds, the largest rank's bytes."""

    workload: str
    gbit: float
    plan: str
    predicted_seconds: float
    seconds: float
    median_call: float
    predicted_bytes: int
    peak_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs that both order alike, less those that they order differently, of all pairs: 1 if all, -1 if none."""
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    products = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs]
    return sum((product > 0) - (product < 0) for product in products) / len(pairs)


def tau(rows: Sequence[Row]) -> float:
    return kendall_tau([row.predicted_seconds for row in rows], [row.seconds for row in rows])


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """How far off predictions are, and how well they order plans."""
    times, bytes_ = ([abs(row.time_error) for row in rows], [abs(row.memory_error) for row in rows])
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.gbit), []).append(row)
    return {
        "mean_time_error": statistics.mean(times),
        "worst_time_error": max(times),
        "mean_memory_error": statistics.mean(bytes_),
        "worst_memory_error": max(bytes_),
        "tau_of_plans": statistics.mean(tau(group) for group in groups.values()),
        "tau_of_all": tau(rows),
    }


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| workload | Gbit/s | plan | predicted ms | measured ms | error | predicted MiB | measured MiB | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.workload} | {row.gbit:g} | {row.plan} | {1e3 * row.predicted_seconds:.1f} | "
            f"{1e3 * row.seconds:.1f} | {row.time_error:+.1%} | {row.predicted_bytes / MIB:.1f} | "
            f"{row.peak_bytes / MIB:.1f} | {row.memory_error:+.1%} |"
        )
    found = summary(rows)
    lines += [
        "",
        f"Time: off by {found['mean_time_error']:.1%} on average, {found['worst_time_error']:.1%} at worst. Memory: "
        f"{found['mean_memory_error']:.1%} and {found['worst_memory_error']:.1%}. Kendall's tau of predicted and "
        f"measured times: {found['tau_of_plans']:.2f} over the plans of a workload and speed (mean), "
        f"{found['tau_of_all']:.2f} over all.",
    ]
    return "\n".join(lines)


class Runs:
    """The runs at one speed: fresh processes for each, and one folder of measurements for all."""

    def __init__(self, lab: Lab, gbit: float, size: str, steps: int, folder: str) -> None:
        self.lab, self.gbit, self.size, self.steps, self.folder = lab, gbit, size, steps, folder
        self.ports = itertools.count(PORT)

    def ask(self, workload: str, do: str, **request: Any) -> list[dict[str, Any]]:
        """Start the ranks, have one request answered by each, and end them."""
        arguments, environment = (workload, self.size), {"WEFT_CACHE_DIR": self.folder}
        team = Team(self.lab, "benchmarks.prediction_rank", arguments, next(self.ports), environment)
        try:
            return team.ask(do, **request)
        finally:
            team.close()

    def row(self, workload: str, plan: str) -> Row:
        answers = self.ask(workload, "measure", **asdict(PLANS[plan]), count=self.steps)
        largest = {key: max(answer[key] for answer in answers) for key in answers[0]}
        return Row(workload=workload, gbit=self.gbit, plan=plan, **largest)


def arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", help=f"of {', '.join(NAMES)}, with commas between")
    parser.add_argument("--gbit", default="0.5,1", help="speeds of the links, with commas between: one lab for each")
    parser.add_argument("--size", default="base", help=" or ".join(SIZES))
    parser.add_argument("--steps", type=int, default=12, help="that are measured of each plan")
    parser.add_argument("--oversubscribe", action="store_true", help="let hosts share cores")
    parser.add_argument("--record", action="store_true", help="write to benchmarks/results")
    return parser.parse_args()


def measured(args: argparse.Namespace, workloads: Sequence[str], progress: Callable[[str], None]) -> list[Row]:
    rows = []
    for gbit in parse_speeds(args.gbit, args.gbit.count(",") + 1):
        shape = Shape((gbit,) * HOSTS, oversubscribe=args.oversubscribe)
        with Lab(shape) as lab, tempfile.TemporaryDirectory() as folder:
            runs = Runs(lab, gbit, args.size, args.steps, folder)
            for workload in workloads:
                progress(f"{workload}, {gbit:g} Gbit/s: a first run")
                runs.ask(workload, "learn")
                for plan in PLANS:
                    progress(f"{workload}, {gbit:g} Gbit/s: {plan}")
                    rows.append(runs.row(workload, plan))
    return rows


def main() -> int:
    args = arguments()
    started = time.perf_counter()
    try:
        workloads = chosen("workload", args.workloads, NAMES, ("gpt", "llama", "lstm", "bert"))
        chosen("size", args.size, SIZES, SIZES[:1])
        if args.steps < 1:
            raise LabError(f"--steps {args.steps}: at least 1")
        rows = measured(
            args, workloads, lambda text: print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)
        )
    except LabError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    result = {
        "size": args.size,
        "hosts": HOSTS,
        "steps": args.steps,
        "rows": [asdict(row) for row in rows],
        "summary": summary(rows),
        "command": " ".join(["python -m benchmarks.prediction", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
    }
    path = (ROOT / "benchmarks" / "results" if args.record else ROOT / "out" / "bench") / "prediction.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(rows))
    print(f"{path.relative_to(ROOT)}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
