"""What planning decides: enough to build the same programs again, as JSON.

A plan belongs to a step: the traced graph, the parameters, the world and the options. `Identity` says which, in lines
that a person can compare, so that a plan for another step is refused with what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import PlanError
from weft.graph import PassReport, Policy, Variant
from weft.state.layout import Layout, ParameterInfo
from weft.trace.capture import Trace

FORMAT = 1


@dataclass(frozen=True)
class Decisions:
    """What rank 0 decided, beside the step that it is for."""

    identity: Mapping[str, str]
    layout: Mapping[str, Any]  # Layout.decisions()
    policies: Mapping[Variant, Policy | None]
    reports: tuple[PassReport, ...] = ()  # of the passes that chose the layout
    why: tuple[str, ...] = ()
    tier: Mapping[str, float] | None = None  # what copies to and from the next tier take, where there are some

    def to_json(self) -> str:
        """The same text for the same decisions, byte for byte."""
        value = {
            "format": FORMAT,
            "identity": dict(self.identity),
            "layout": dict(self.layout),
            "policies": {name: None if policy is None else asdict(policy) for name, policy in self.policies.items()},
            "reports": [asdict(report) for report in self.reports],
            "why": list(self.why),
            "tier": None if self.tier is None else dict(self.tier),
        }
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Decisions:
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                found = value.get("format") if isinstance(value, dict) else type(value).__name__
                raise PlanError(f"{where} holds format {found!r}, and this version of weft reads {FORMAT}: plan anew")
            for name, kind in (("identity", dict), ("layout", dict), ("policies", dict), ("why", list)):
                if not isinstance(value[name], kind):
                    raise TypeError(f"{name} is a {type(value[name]).__name__}")
            return cls(
                identity=value["identity"],
                layout=value["layout"],
                policies={
                    name: None if policy is None else Policy(**policy) for name, policy in value["policies"].items()
                },
                reports=tuple(PassReport(**report) for report in value["reports"]),
                why=tuple(value["why"]),
                tier=value["tier"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{where} is not a whole plan ({error}): delete it, and plan anew") from error

    def build_layout(self, parameters: Sequence[ParameterInfo], world: int, where: str) -> Layout:
        try:
            layout = Layout.from_decisions(parameters, self.layout, world)
            _check_buckets(parameters, layout)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise PlanError(f"{where} does not describe buckets of this model ({error!r}): plan anew") from error
        return layout


def _check_buckets(parameters: Sequence[ParameterInfo], layout: Layout) -> None:
    """A file may be edited by hand: whatever is trained lies in one bucket, and every bucket is reduced once."""
    placed = sorted(slot.parameter for bucket in layout.buckets for slot in bucket.slots)
    if len(set(placed)) != len(placed) or any(not 0 <= index < len(parameters) for index in placed):
        raise ValueError(f"the buckets hold parameters {placed}")
    missing = [p.name for p in parameters if p.group is not None and p.index not in layout.slot_of]
    if missing:
        raise ValueError(f"no bucket holds {', '.join(missing[:5])}")
    trained = [bucket.index for bucket in layout.buckets if bucket.trained]
    kept = [b.index for b in layout.buckets if b.scatter and not b.sharded and b.trained and not b.dormant]
    sharded = {bucket.index for bucket in layout.buckets if bucket.sharded}
    for name, found, expected in (
        ("reduce_order", layout.reduce_order, trained),
        ("next_order", layout.next_order, kept),
        ("gather_order", [bucket for bucket, phase in layout.gather_order if phase == "forward"], sorted(sharded)),
    ):
        if sorted(found) != expected:
            raise ValueError(f"{name} is {list(found)}, of buckets {expected}")
    if not set(layout.offloaded) <= set(trained) or layout.offload_window < 1:
        raise ValueError(f"offloaded is {list(layout.offloaded)}, window {layout.offload_window}")


def identity(
    trace: Trace, parameters: Sequence[ParameterInfo], options: Mapping[str, str], world: int
) -> dict[str, str]:
    """What a plan is made for, in lines to compare."""
    lines = {
        f"parameter {info.name}": (
            f"{list(info.shape)} {info.dtype} group {info.group} compute {info.compute} reduce {info.reduce} "
            f"master {info.master}"
        )
        for info in parameters
    }
    if len(lines) > 2000:  # large models: one line is enough to see a difference
        lines = {"parameters": hashlib.sha256(json.dumps(lines).encode()).hexdigest()}
    return {**options, "world": str(world), "graph": graph_hash(trace), **lines}


def graph_hash(trace: Trace) -> str:
    """A hash of what a trace computes, the same in every process."""
    digest = hashlib.sha256()
    numbers = {node: index for index, node in enumerate(trace.graph.nodes)}
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        shape = tuple(getattr(value, "shape", ()))
        inputs = [numbers[source] for source in node.all_input_nodes]
        plain = [arg for arg in node.args if isinstance(arg, (int, float, bool, str))]
        dtype = getattr(value, "dtype", None)
        digest.update(f"{node.op} {node.target} {inputs} {plain} {[str(size) for size in shape]} {dtype}\n".encode())
    return digest.hexdigest()


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """In words, the first line in which two identities differ; the hash of the graph comes last."""
    keys = sorted(ours.keys() | theirs.keys(), key=lambda key: (key == "graph", key))
    for key in keys:
        if ours.get(key) != theirs.get(key):
            return f"{key} is {ours.get(key, 'not there')} here and {theirs.get(key, 'not there')} in the plan"
    return None


def read(path: Path, ours: Mapping[str, str]) -> Decisions:
    """A saved plan for this step; a plan for another one is refused with what differs."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"the plan {path} cannot be read ({error})") from error
    decisions = Decisions.from_json(text, f"the plan {path}")
    difference = first_difference(ours, decisions.identity)
    if difference is not None:
        raise PlanError(f"the plan {path} is for another step: {difference}. Leave plan= out to plan anew")
    return decisions
