"""`step.plan`: the compiled step as Python, and why it is what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft import graph as g
from weft.graph import StepGraph
from weft.state.layout import Layout


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


@dataclass(frozen=True)
class Plan:
    """What weft decided for a step, readable.

    Attributes:
        mode: how parameters and optimizer state are spread.
        layout: the buckets and the order of their collectives.
        programs: the micro-step programs of the signature seen last, by their place in the step.
        why: reasons, one a line.
        state_bytes: what a rank keeps between steps.
        arena_bytes: what comes and goes within a step (activations apart).
    """

    mode: str
    layout: Layout
    programs: dict[str, StepGraph]
    why: tuple[str, ...]
    state_bytes: int
    arena_bytes: int

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
        lines += [f"  {reason}" for reason in self.why]
        lines.append(
            f"{len(layout.buckets)} buckets; a rank keeps {human_bytes(self.state_bytes)} between steps and "
            f"{human_bytes(self.arena_bytes)} of buffers within one"
        )
        lines.append(f"{self.gathers} gathers and {self.reductions} reductions a step")
        for bucket in layout.buckets:
            traits = []
            if bucket.dormant:
                traits.append("not reached by the first loss; reduced only in steps that reach it")
            elif not bucket.trained:
                traits.append("frozen")
            if bucket.sharded:
                traits.append("released after use")
            elif bucket.scatter:
                traits.append("gathered after its update")
            padding = bucket.numel - sum(slot.numel for slot in bucket.slots)
            lines.append(
                f"  {bucket.describe()}: {human_bytes(bucket.bytes(bucket.compute))} {str(bucket.compute)[6:]}, "
                f"padding {padding / bucket.numel:.1%}{'; ' if traits else ''}{', '.join(traits)}"
            )
        for variant, step in self.programs.items():
            lines.append(f"program {variant!r}: {len(step.graph.nodes)} nodes")
            lines += [f"  {report.name}: {report.summary}" for report in step.reports]
        return "\n".join(lines)

    def code(self, variant: str | None = None) -> str:
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
