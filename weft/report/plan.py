"""`step.plan`: the compiled step as Python, and why it is what it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path

from weft import graph as g
from weft.graph import StepGraph, Variant
from weft.plans.cache import write_whole
from weft.plans.decisions import Decisions
from weft.simulate.memory import MemoryCurve
from weft.simulate.timeline import Timeline
from weft.state.layout import Bucket, Layout
from weft.units import human_bytes

LARGEST = 10  # waits that are named
NOTHING_TIMED = Timeline(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """What weft decided for a step, readable.

    Attributes:
        layout: the buckets and the order of their collectives.
        programs: the micro-step programs of the signature seen last, by their place in the step.
        decisions: what was decided, as it is saved.
        why: reasons, one a line.
        timeline: simulates the step; None where nothing was timed (one rank).
        memory: predicts a rank's memory through the step.
        state_bytes: what a rank keeps between steps.
        arena_bytes: what comes and goes within a step (activations apart).
        measured_seconds: of the steps so far, the median; None before there are enough.
    """

    layout: Layout
    programs: dict[Variant, StepGraph]
    decisions: Decisions
    why: tuple[str, ...]
    timeline: Callable[[], Timeline] | None
    memory: Callable[[], MemoryCurve]
    state_bytes: int
    arena_bytes: int
    measured_seconds: float | None = None

    @property
    def mode(self) -> str:
        """How parameters and optimizer state are spread; buckets may differ."""
        return self.layout.mode

    @cached_property
    def predicted(self) -> Timeline:
        """What the step will take: `.seconds`, `.exposed_seconds`, `.bound_seconds`, `.peak_bytes`, ..."""
        memory = self.memory()
        found = NOTHING_TIMED if self.timeline is None else self.timeline()
        return replace(found, peak_bytes=memory.peak_bytes, memory=memory.parts)

    def save(self, path: str | PathLike[str]) -> None:
        """Keep the decisions as JSON, for `weft.compile(..., plan=path)` on the same step."""
        write_whole(Path(path), self.decisions.to_json())

    @property
    def gathers(self) -> int:
        """Gathers in a step, all micro-steps together."""
        return self._per_step(g.gather)

    @property
    def reductions(self) -> int:
        """Reductions in a step, all micro-steps together."""
        return self._per_step(g.reduce)

    def _per_step(self, target: object) -> int:
        total = 0
        for variant, step in self.programs.items():
            times = step.accumulate - 2 if variant == "middle" else 1
            total += times * sum(
                node.target is target and not step.layout.buckets[g.bucket_of(node)].dormant
                for node in step.graph.nodes
            )
        return total

    def explain(self) -> str:
        """The plan in a few lines: what was chosen, and why."""
        layout = self.layout
        lines = [f"mode {self.mode} on {layout.world} rank{'s' if layout.world > 1 else ''}"]
        lines += [f"  {reason}" for reason in (*self.why, *self.decisions.why)]
        lines.append(
            f"{len(layout.buckets)} buckets; a rank keeps {human_bytes(self.state_bytes)} between steps and "
            f"{human_bytes(self.arena_bytes)} of buffers within one"
        )
        lines.append(f"{self.gathers} gathers and {self.reductions} reductions a step")
        lines += self._predictions()
        for report in self.decisions.reports:
            lines.append(f"  {report.describe()}")
        for bucket in layout.buckets:
            traits = []
            if bucket.dormant:
                traits.append("not reached by the first loss; reduced only in steps that reach it")
            elif not bucket.trained:
                traits.append("frozen")
            if bucket.sharded:
                traits.append("released after use")
            elif bucket.scatter and bucket.trained:
                traits.append("gathered after its update")
            elif bucket.trained and layout.world > 1:
                traits.append("updated by every rank")
            if self.reduces_once_of_many(bucket):
                traits.append("reduced once a step")
            if bucket.index in layout.offloaded:
                traits.append("its optimizer state is offloaded between updates")
            padding = bucket.numel - sum(slot.numel for slot in bucket.slots)
            lines.append(
                f"  {bucket.describe()}: {human_bytes(bucket.bytes(bucket.compute))} {str(bucket.compute)[6:]}, "
                f"padding {padding / bucket.numel:.1%}{'; ' if traits else ''}{', '.join(traits)}"
            )
        for variant, step in self.programs.items():
            lines.append(f"program {variant!r}: {len(step.graph.nodes)} nodes")
            lines += [f"  {report.describe()}" for report in step.reports]
        return "\n".join(lines)

    def reduces_once_of_many(self, bucket: Bucket) -> bool:
        mixed = any(other.reduce_often for other in self.layout.buckets)
        return mixed and bucket.trained and not bucket.reduce_often and not bucket.dormant

    def _predictions(self) -> list[str]:
        """Time and memory as simulated, what most of the waiting is for, and what was measured since."""
        predicted = self.predicted
        parts = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in predicted.memory.items() if nbytes)
        lines = [f"predicted peak of a rank's memory: {human_bytes(predicted.peak_bytes)} ({parts})"]
        if not predicted.seconds:
            return lines
        lines.append(
            f"predicted step: {1e3 * predicted.seconds:.1f} ms, of which {1e3 * predicted.exposed_seconds:.1f} ms wait "
            f"for communication; the first {1e3 * predicted.prologue_seconds:.1f} ms; no order of these ops and "
            f"messages takes less than {1e3 * predicted.bound_seconds:.1f} ms"
        )
        if self.measured_seconds is not None:
            ratio = self.measured_seconds / predicted.seconds
            lines.append(f"measured step: {1e3 * self.measured_seconds:.1f} ms, {ratio:.2f} of the prediction")
        waits = sorted(predicted.waits.items(), key=lambda item: -item[1])[:LARGEST]
        lines += [f"  {1e3 * seconds:.1f} ms at {name}" for name, seconds in waits if seconds > 1e-4]
        return lines

    def code(self, variant: Variant | None = None) -> str:
        """A micro-step's program as Python; each step node says which pass put it where it is."""
        variant = variant or next(iter(self.programs))
        if variant not in self.programs:
            raise ValueError(f"variant={variant!r}: this plan has {', '.join(map(repr, self.programs))}")
        return program_code(self.programs[variant])


def program_code(step: StepGraph) -> str:
    by_name = {node.name: node for node in step.graph.nodes}
    lines = []
    for line in step.graph.python_code("self").src.strip().splitlines():
        match = re.match(r"\s+(\w+)(?:\s*:[^=]*)? = ", line)
        node = by_name.get(match[1]) if match else None
        if node is not None and not node.users:
            # A statement: without the name that fx gives its result, and takes away again.
            line = line.replace(f"{node.name} = ", "").removesuffix(";  None")
        origin = node.meta.get("pass") if node is not None else None
        lines.append(f"{line.rstrip()}  # {origin}" if origin else line.rstrip())
    return "\n".join(lines).replace("weft_graph_", "weft.")
