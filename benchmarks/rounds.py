"""The method: contestants in one lab, alive at the same time and taking turns, round by round.

Each contestant is one process a host. While one has its turn the others wait for their next request, so that all see
the same machine, minute by minute; a contestant's result is its time over the baseline's in the same round.
"""

from __future__ import annotations

import json
import math
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import BASELINE, PEERS, REFERENCES
from benchmarks.workloads import Work, workload
from weft.lab.cluster import Lab, Shape

ROOT = Path(__file__).parent.parent
ANSWER_TIMEOUT = 600.0  # seconds: compiling a whole step takes a minute
LOSS_STEPS, LOSS_TOLERANCE = 10, 1e-4
WARM_UP = 2
PORT = 29700
Progress = Callable[[str], None]


class Failed(RuntimeError):
    """A contestant that cannot go on, in its own words."""


class Disagreement(RuntimeError):
    """Contestants whose losses differ: they do not do the same work, so their times say nothing."""


@dataclass
class Outcome:
    """What was measured of one contestant; `why_not` is set where it could not run."""

    peer: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    why_not: str | None = None
    start_seconds: float = 0.0  # building and the first step: compiling, planning
    seconds: list[float] = field(default_factory=list)  # of a step, per round
    ratios: list[float] = field(default_factory=list)  # to the baseline's, in the same round
    cpu_seconds: list[float] = field(default_factory=list)  # of a process in a step, per round
    passes: float | None = None  # of all parameters over the wire in a step, of who knows it
    sent_bytes: float = 0.0  # by a host, a step, packet headers included
    peak_bytes: int = 0  # of the rank that had most, beyond its imports
    losses: list[float] = field(default_factory=list)  # without dropout, of all ranks one after the other


@dataclass(frozen=True)
class Turn:
    """A step, as the slowest rank and the host that sends most see it."""

    seconds: float
    cpu_seconds: float
    passes: float | None
    sent_bytes: float


class Team:
    """The processes of one contestant: `python -m MODULE ARGUMENTS... RANK WORLD ADDRESS` on every host."""

    def __init__(
        self,
        lab: Lab,
        module: str,
        arguments: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.lab = lab
        self.answers: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.said: list[str] = []
        hosts = lab.shape.hosts
        self.processes = [
            lab.start(
                host,
                [
                    *(sys.executable, "-m", module, *arguments),
                    *(str(host), str(hosts), f"{lab.network.address(0)}:{port}"),
                ],
                {
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONPATH": str(ROOT),
                    "HF_HUB_OFFLINE": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    **(environment or {}),
                },
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(hosts)
        ]
        for host, process in enumerate(self.processes):
            threading.Thread(target=self._listen, args=(host, process), daemon=True).start()
        try:
            self._collect()
        except BaseException:
            self.close()
            raise

    def _listen(self, host: int, process: subprocess.Popen[str]) -> None:
        from benchmarks.worker import ANSWER

        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                self.answers.put((host, json.loads(line.removeprefix(ANSWER))))
            else:
                self.said.append(line.rstrip())
        self.answers.put((host, None))

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """Send a request to every rank, and return their answers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
        return self._collect()

    def _collect(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while len(found) < len(self.processes):
            try:
                host, answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Failed(f"no answer from all ranks within {ANSWER_TIMEOUT:g} s") from None
            if answer is None:
                last = next((line for line in reversed(self.said) if line.strip()), "it said nothing")
                raise Failed(f"rank {host} ended: {last.strip()}")
            if "cannot" in answer:
                raise Failed(answer["cannot"])
            found[host] = answer
        return [found[host] for host in range(len(self.processes))]

    def turn(self, count: int) -> Turn:
        """So many steps."""
        hosts = range(len(self.processes))
        before = [self.lab.network.sent(host) for host in hosts]
        answers = self.ask("steps", count=count)
        seconds, cpu = (max(answer[what] for answer in answers) / count for what in ("seconds", "cpu"))
        sent = max(self.lab.network.sent(host) - before[host] for host in hosts) / count
        return Turn(seconds, cpu, answers[0]["passes"], sent)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@dataclass
class Match:
    """What is compared, and how long."""

    workload: str
    size: str
    peers: Sequence[str]
    rounds: int
    turn_seconds: float
    sweep: bool
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        self.port = PORT

    def run(self, shape: Shape, progress: Progress) -> dict[str, Any]:
        """The whole comparison, as a JSON-ready result."""
        outcomes: dict[str, Outcome] = {}
        contestants = [BASELINE, *(peer for peer in self.peers if peer != BASELINE)]
        parameters = 0
        with Lab(shape) as lab:
            teams: dict[str, Team] = {}
            for peer in [*REFERENCES, *contestants]:
                progress(f"{self.workload}: starting {(PEERS | REFERENCES)[peer].title}")
                outcomes[peer] = Outcome(peer, (PEERS | REFERENCES)[peer].title)
                try:
                    teams[peer], parameters = self._prepare(lab, peer, outcomes[peer])
                except Failed as error:
                    outcomes[peer].why_not = str(error)
                    progress(f"{self.workload}: {outcomes[peer].title} cannot run: {error}")
            if BASELINE not in teams:
                raise Failed(f"the baseline, {BASELINE}, cannot run: {outcomes[BASELINE].why_not}")
            self._compare_losses([outcomes[peer] for peer in contestants if peer in teams])
            count = max(1, math.ceil(self.turn_seconds / teams[BASELINE].turn(2).seconds))
            for team in teams.values():
                team.ask("reset_memory")
            for index in range(self.rounds):
                progress(f"{self.workload}: round {index + 1} of {self.rounds}, {count} steps a turn")
                self._round(teams, outcomes, count, first=index)
            for peer, team in teams.items():
                outcomes[peer].peak_bytes = max(answer["bytes"] for answer in team.ask("memory"))
                outcomes[peer].ratios = [
                    mine / base for mine, base in zip(outcomes[peer].seconds, outcomes[BASELINE].seconds, strict=True)
                ]
        return {
            "workload": self.workload,
            "size": self.size,
            **asdict(self.work),
            "parameters": parameters,
            "hosts": shape.hosts,
            "gbit": list(shape.gbit),
            "lab": shape.describe(),
            "rounds": self.rounds,
            "steps_a_turn": count,
            "baseline": BASELINE,
            "outcomes": {peer: asdict(outcome) for peer, outcome in outcomes.items()},
        }

    def _prepare(self, lab: Lab, peer: str, outcome: Outcome) -> tuple[Team, int]:
        """Processes of a contestant, warmed up; with `sweep` at the fastest of its settings."""
        found: list[tuple[float, Team, int, Mapping[str, Any]]] = []
        try:
            for settings in (PEERS | REFERENCES)[peer].sweep if self.sweep else ():
                team, parameters = self._start(lab, peer, settings, outcome)
                found.append((team.turn(4).seconds, team, parameters, settings))
                found.sort(key=lambda entry: entry[0])
                for _, slower, *_ in found[1:]:
                    slower.close()
                del found[1:]
        except BaseException:
            for _, team, *_ in found:
                team.close()
            raise
        if found:
            _, team, parameters, settings = found[0]
            outcome.settings = dict(settings)
            return team, parameters
        return self._start(lab, peer, {}, outcome)

    def _start(self, lab: Lab, peer: str, settings: Mapping[str, Any], outcome: Outcome) -> tuple[Team, int]:
        dropout = workload(self.workload, self.size).dropout
        self.port += 1
        arguments = (peer, json.dumps(dict(settings)), self.workload, self.size, json.dumps(asdict(self.work)))
        team = Team(lab, "benchmarks.worker", arguments, self.port)
        try:
            started = time.perf_counter()
            parameters = team.ask("build", dropout=0.0)[0]["parameters"]
            first = team.ask("steps", count=1)
            outcome.start_seconds = time.perf_counter() - started
            rest = team.ask("steps", count=LOSS_STEPS - 1)
            outcome.losses = [
                loss for one, nine in zip(first, rest, strict=True) for loss in (*one["losses"], *nine["losses"])
            ]
            if dropout:
                team.ask("build", dropout=dropout)
            team.ask("steps", count=WARM_UP)
        except BaseException:
            team.close()
            raise
        return team, parameters

    @staticmethod
    def _compare_losses(outcomes: Sequence[Outcome]) -> None:
        base = next(outcome for outcome in outcomes if outcome.peer == BASELINE)
        for outcome in outcomes:
            for index, (mine, theirs) in enumerate(zip(outcome.losses, base.losses, strict=True)):
                if not abs(mine - theirs) <= LOSS_TOLERANCE * abs(theirs):
                    raise Disagreement(
                        f"{outcome.title} and {base.title} do not do the same work: the loss of rank "
                        f"{index // LOSS_STEPS} in step {index % LOSS_STEPS + 1} is {mine} and {theirs}"
                    )

    @staticmethod
    def _round(teams: dict[str, Team], outcomes: dict[str, Outcome], count: int, first: int) -> None:
        """One turn for everybody; each round begins with another contestant."""
        order = list(teams)
        start = first % len(order)
        for peer in order[start:] + order[:start]:
            turn = teams[peer].turn(count)
            outcomes[peer].seconds.append(turn.seconds)
            outcomes[peer].cpu_seconds.append(turn.cpu_seconds)
            outcomes[peer].passes, outcomes[peer].sent_bytes = turn.passes, turn.sent_bytes


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
