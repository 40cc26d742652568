"""From the first trace of a step to one plan that all ranks hold: measured, decided on rank 0, sent and checked."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.errors import PlanError, StoreError, TierError
from weft.graph import Policy, Variant
from weft.measure.agree import agree_on_costs
from weft.measure.store import Store
from weft.measure.tiers import TierTimes, measure_tier
from weft.options import Options
from weft.passes.auto import TooLittle, auto
from weft.passes.candidate import Candidate, Problem, plan_programs, room_of
from weft.plans.cache import PlanCache
from weft.plans.decisions import Decisions, first_difference, graph_hash, identity, read
from weft.predict.costs import Costs
from weft.run.collectives import Local
from weft.state.layout import Layout, ParameterInfo
from weft.state.offload import tier_folder
from weft.trace.capture import Trace
from weft.units import human_bytes
from weft.version import __version__

# What rank 0 may fail with, the same on all ranks; a subclass comes before its base.
ERRORS: dict[str, type[Exception]] = {
    "PlanError": PlanError,
    "TooLittle": TooLittle,
    "TierError": TierError,
    "ValueError": ValueError,
}


@dataclass(frozen=True)
class Planned:
    """The agreed plan."""

    decisions: Decisions
    layout: Layout
    costs: Costs | None

    def policy(self, variant: Variant) -> Policy | None:
        """How to place a program's communication; None: as `shard` does, which was found to be best.

        Evaluation, and steps with fewer micro-steps, are planned as the training that there is.
        """
        policies = self.decisions.policies
        if variant in policies:
            return policies[variant]
        return next((policy for policy in policies.values() if policy is not None), None)


@dataclass
class Planner:
    """What plans are made from, beside the trace."""

    parameters: Sequence[ParameterInfo]
    options: Options
    collectives: Local
    device: torch.device
    optimizer: torch.optim.Optimizer
    state_elements: float
    update_elements: float
    fused: bool
    whole_update: bool
    buffer_bytes: int
    budget: int
    on_meta: Sequence[str]  # parameters that have no values yet
    before: str | None  # the plan of a checkpoint that this step goes on from
    folder: Path  # of measurements and plans
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """A collective call: a rank whose measurements cannot be read tells the others."""
        self.cache = PlanCache(self.folder)
        self._failure: Exception | None = None
        try:
            self.store = Store(self.folder, self.device)
        except StoreError as error:
            self._failure = error
        problems = self.collectives.gather_objects(None if self._failure is None else str(self._failure))
        for rank, problem in enumerate(problems):
            if problem is not None:
                where = f"rank {rank}: " if self.collectives.world > 1 else ""
                raise StoreError(f"{where}{problem}") from self._failure

    def plan(self, trace: Trace) -> Planned:
        """A collective call: every rank gets rank 0's plan for its trace, or the same error."""
        mine = identity(trace, self.parameters, self._options(), self.collectives.world)
        self._check_alike(mine)
        problem = self._problem(trace)
        if self.collectives.world > 1:
            problem = replace(problem, costs=self._costs(problem))
        return self._agreed(self._of_rank_0(lambda: self._decisions(problem, mine).to_json()), problem.costs)

    def again(self, trace: Trace, planned: Planned, costs: Costs) -> Planned:
        """The same layout with communication placed anew, from other costs; a collective call.

        Later runs of the step start from these costs, and find this plan.
        """
        problem = replace(self._problem(trace), costs=costs)

        self.store.put("scales", self._scale_key(trace), costs.scale)
        self.store.save()
        return self._agreed(self._of_rank_0(lambda: self._again(problem, planned)), costs)

    def _of_rank_0(self, decide: Callable[[], str]) -> str:
        """What rank 0 decides, or its error, which all ranks raise: nobody waits for a rank that has given up."""
        answer, failure = None, None
        if self._decides:
            try:
                answer = "plan", decide()
            except Exception as error:
                answer, failure = (_kind(error), str(error)), error
        kind, text = self.collectives.gather_objects(answer)[0]
        if failure is not None:
            raise failure
        if kind != "plan":
            raise ERRORS.get(kind, RuntimeError)(text if kind in ERRORS else f"rank 0 could not plan: {kind}: {text}")
        return text

    def _agreed(self, text: str, costs: Costs | None) -> Planned:
        where = "the plan of rank 0"
        decisions = Decisions.from_json(text, where)
        layout = decisions.build_layout(self.parameters, self.collectives.world, where)
        self._check_same(layout, decisions)
        if decisions.tier is not None and costs is not None:
            tier = TierTimes.from_json(decisions.tier)
            costs = replace(costs, tier=tier, state_elements=self.state_elements)
        return Planned(decisions, layout, costs)

    @property
    def _decides(self) -> bool:
        """Rank 0 does; a process that only plans, as whichever rank, has no other to ask."""
        return self.collectives.rank == 0 or self.collectives.name == "fake"

    def _options(self) -> dict[str, str]:
        options = self.options
        return {
            "versions": f"weft {__version__}, torch {torch.__version__}",
            "mode": options.mode,
            "accumulate": str(options.accumulate),
            "clip_norm": str(options.clip_norm),
            "optimizer": type(self.optimizer).__name__,
            "passes": json.dumps(dict(options.passes), sort_keys=True, default=str),
        }

    def _check_alike(self, mine: Mapping[str, str]) -> None:
        """All ranks compile the same step; their batches, and so their graphs, may differ."""
        lines = {key: value for key, value in mine.items() if key != "graph"}
        lines |= {f"parameter {name}": f"{lines.get(f'parameter {name}', '')} on meta" for name in self.on_meta}
        lines |= {"offload": "off" if self.options.offload == "off" else "allowed", "plan": self._plan_file()}
        answers = self.collectives.gather_objects(lines)
        for rank, theirs in enumerate(answers):
            if theirs == answers[0]:
                continue
            keys = [key for key in (*answers[0], *theirs) if answers[0].get(key) != theirs.get(key)]
            ours, other = (answer.get(keys[0], "not there") for answer in (answers[0], theirs))
            raise ValueError(
                f"ranks 0 and {rank} compile different steps: {keys[0]} {ours} on rank 0, {keys[0]} {other} on rank "
                f"{rank}. All ranks must build the same model, optimizer and options"
            )

    def _plan_file(self) -> str:
        path = self.options.plan
        if path is None:
            return "none"
        try:
            return f"a file with the hash {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        except OSError as error:
            return f"a file that cannot be read ({error.strerror})"

    def _problem(self, trace: Trace) -> Problem:
        options = self.options
        return Problem(
            trace=trace,
            parameters=self.parameters,
            options=options,
            world=self.collectives.world,
            costs=None,
            receives=self.collectives.receives,
            bucket_bytes=options.bucket_bytes(self.device),
            state_elements=self.state_elements,
            update_elements=self.update_elements,
            whole_update=self.whole_update,
            buffer_bytes=self.buffer_bytes,
            budget=self.budget,
            device=self.device,
            tier=self._tier,
            thrifty=options.mode == "zero3" and not options.memory_given,
        )

    def _tier(self) -> TierTimes:
        """What copies to and from the next tier take: from the store, or measured."""
        on_disk = self.device.type == "cpu"
        folder = tier_folder(self.options) if on_disk else None
        known = self.store.get("tiers", str(folder))
        if known is None:
            self.progress("copies to the next tier")
            known = measure_tier(folder, self.device).to_json()
            self.store.put("tiers", str(folder), known)
            self.store.save()
        return TierTimes.from_json(known)

    def _costs(self, problem: Problem) -> Costs:
        mode = "replicate" if self.whole_update else "zero1" if problem.options.mode == "auto" else problem.options.mode
        _, programs = plan_programs(problem, problem.layout(mode), None)
        nodes = [node for program in programs.values() for node in program.graph.nodes]
        largest = max(b.bytes(b.reduce) for program in programs.values() for b in program.layout.buckets)
        return agree_on_costs(
            nodes,
            self.store,
            self.collectives,
            device=self.device,
            memory_limit=self.budget,
            largest=largest,
            optimizer=self.optimizer,
            fused=self.fused,
            graph=self._scale_key(problem.trace),
            progress=self.progress,
        )

    def _scale_key(self, trace: Trace) -> str:
        return f"{graph_hash(trace)[:16]} world {self.collectives.world}"

    # ---- rank 0 ----

    def _decisions(self, problem: Problem, mine: dict[str, str]) -> Decisions:
        if self.options.plan is not None:
            return read(Path(self.options.plan), mine)
        if self.before is not None:
            kept = Decisions.from_json(self.before, "the plan in the checkpoint")
            # Its first batch may have had another shape: a layout serves all.
            if {**kept.identity, "graph": ""} == {**mine, "graph": ""} and self._usable(kept):
                return kept
        given = self._given(problem)
        found = self.cache.find(mine, given)
        if found is not None and self._usable(found):
            return found
        self.progress("planning")
        choice = auto(problem)
        best = choice.best
        decisions = Decisions(
            identity=mine,
            layout=best.layout.decisions(),
            policies={variant: step.policy for variant, step in best.programs.items()},
            reports=choice.reports,
            why=tuple(self._why(problem, best, choice.others)),
            tier=None if choice.tier is None else choice.tier.to_json(),
        )
        if self.collectives.world > 1:
            self.cache.keep(decisions, given)
        return decisions

    def _again(self, problem: Problem, planned: Planned) -> str:
        layout, programs = plan_programs(problem, planned.layout, room_of(problem, planned.layout))
        policies = {variant: step.policy for variant, step in programs.items()}
        decisions = replace(planned.decisions, layout=layout.decisions(), policies=policies)
        self.cache.keep(decisions, self._given(problem))
        return decisions.to_json()

    def _given(self, problem: Problem) -> list[object]:
        """What a plan depends on beside the step itself."""
        costs = problem.costs
        return [
            *(problem.budget, problem.options.memory_given, problem.options.offload == "off"),
            *(problem.bucket_bytes, problem.receives, problem.device.type, problem.buffer_bytes),
            # Of an optimizer: more than its name, since its options decide what it keeps.
            *(problem.state_elements, problem.update_elements, problem.whole_update),
            None if costs is None else [costs.source, costs.scale],
        ]

    def _usable(self, found: Decisions) -> bool:
        try:
            found.build_layout(self.parameters, self.collectives.world, "a plan kept from before")
        except PlanError as error:
            warnings.warn(f"{error}, which is done now", stacklevel=2)
            return False
        return True

    def _why(self, problem: Problem, best: Candidate, others: Sequence[Candidate]) -> list[str]:
        asked = "as asked for" if problem.options.mode != "auto" else "the fastest that fits"
        lines = [f"{best.name}: {asked} in {human_bytes(problem.budget)} a rank"]
        if problem.world == 1 and problem.options.mode == "auto":
            lines = ["one rank: there is nothing to shard"]
        for candidate in sorted((best, *others), key=lambda c: (c.seconds, c.name)):
            mark = "->" if candidate is best else "  "
            time = "" if candidate.timeline is None else f"{1e3 * candidate.seconds:.1f} ms a step, "
            lines.append(f"{mark} {candidate.name}: {time}{human_bytes(candidate.peak_bytes)} at its peak")
        return lines

    # ---- all ranks ----

    def _check_same(self, layout: Layout, decisions: Decisions) -> None:
        """What this rank has built is what rank 0 decided; every rank learns where one has not."""
        mine = _lines(layout.decisions())
        digests = self.collectives.gather_objects(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        difference = first_difference(mine, _lines(decisions.layout)) or "other ranks hold another plan"
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise PlanError(f"ranks {odd} have not built the plan of rank 0 ({difference})")


def _kind(error: Exception) -> str:
    """The class of an error, as the other ranks are told."""
    return next((name for name, kind in ERRORS.items() if isinstance(error, kind)), type(error).__name__)


def _lines(value: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{key} {index}" if isinstance(entry, list) else key: json.dumps(item, sort_keys=True)
        for key, entry in value.items()
        for index, item in enumerate(entry if isinstance(entry, list) else [entry])
    }
