"""Compare weft with what a user would pick instead, on emulated hosts.

    python -m benchmarks                              two workloads, the main peers, 2 hosts, 1 Gbit/s
    python -m benchmarks --full                       all workloads and peers, settings swept
    python -m benchmarks --workloads gpt --gbit 0.5
    python -m benchmarks --clip 1 --accumulate 16     every step clips, and has 16 micro-batches
    python -m benchmarks --ablations                  DDP, and weft's zero3 with passes switched off

Results go to out/bench, or with --record to benchmarks/results, from which `python -m benchmarks.report` makes the
tables, charts and figures of the documentation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.peers import ABLATIONS, PEERS, standard
from benchmarks.report import file_name, machine, markdown, versions
from benchmarks.rounds import ROOT, Disagreement, Failed, Match
from benchmarks.workloads import NAMES, SIZES, Work
from weft.cli.main import parse_speeds
from weft.lab.cluster import Shape
from weft.lab.errors import LabError

AT_A_TIME = 8  # contestants alive together: all of them in memory, on every host


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all workloads and peers, each peer's settings swept")
    parser.add_argument("--workloads", help=f"of {', '.join(NAMES)}, with commas between")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}, with commas between")
    parser.add_argument("--ablations", action="store_true", help="weft with passes switched off, and the peers named")
    parser.add_argument("--clip", type=float, help="the gradient norm that every step clips to")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--size", default="base", help=" or ".join(SIZES))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbit", default="1", help="of the links: one number, or one a host with commas between")
    parser.add_argument("--rounds", type=int, default=None, help="6, with --full 9")
    parser.add_argument("--turn", type=float, default=2.0, help="seconds that the baseline runs in each round")
    parser.add_argument("--oversubscribe", action="store_true", help="let hosts share cores")
    parser.add_argument("--record", action="store_true", help="write to benchmarks/results")
    return parser.parse_args()


def chosen(kind: str, text: str | None, known: tuple[str, ...], default: tuple[str, ...]) -> list[str]:
    names = list(default) if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise LabError(f"there is no {kind} {name!r}: use {', '.join(known)}")
    return names


def checked(args: argparse.Namespace) -> Work:
    if args.clip is not None and not args.clip > 0:
        raise LabError(f"--clip {args.clip:g}: a positive norm")
    if args.accumulate < 1:
        raise LabError(f"--accumulate {args.accumulate}: at least 1 micro-batch a step")
    return Work(args.clip, args.accumulate)


def main() -> int:
    args = arguments()
    try:
        workloads = chosen("workload", args.workloads, NAMES, NAMES if args.full else ("gpt", "lstm"))
        work = checked(args)
        peers = chosen("peer", args.peers, tuple(PEERS), () if args.ablations else standard(args.full, work))
        if args.ablations:
            peers = list(dict.fromkeys((*peers, *ABLATIONS)))
        (size,) = chosen("size", args.size, SIZES, SIZES[:1])
        shape = Shape(parse_speeds(args.gbit, args.hosts), oversubscribe=args.oversubscribe)
        rounds = args.rounds or (9 if args.full else 6)
        folder = ROOT / "benchmarks" / "results" if args.record else ROOT / "out" / "bench"
        for name in workloads:
            groups = [peers[i : i + AT_A_TIME] for i in range(0, len(peers), AT_A_TIME)]
            for number, group in enumerate(groups):
                match = Match(name, size, group, rounds, args.turn, args.full, work)
                run(match, shape, folder, number, args.ablations)
    except LabError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except (Disagreement, Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def run(match: Match, shape: Shape, folder: Path, number: int, ablations: bool) -> None:
    started = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)

    result = match.run(shape, progress)
    result |= {
        "ablations": ablations,
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(result, number)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    print(f"{path.relative_to(ROOT)}, {time.perf_counter() - started:.0f} s\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
