"""What the planner gives every pass beside the program: times, room, and what is decided already."""

from __future__ import annotations

from dataclasses import dataclass

from weft.graph import Policy
from weft.predict.costs import Costs


@dataclass(frozen=True)
class PlanContext:
    """
    Attributes:
        costs: None where there is nothing to time: one rank, or times not asked for.
        receives: whether a reduce-scatter needs a second buffer.
        room: bytes for buffers that come and go within the step; None: as many as the plain schedule uses.
        policy: how to place communication, if that is decided.
        rule: of prefetch: "hidden" or, as published, "earliest".
        choosing: the order of the next step's gathers is still open; else the layout's is kept.
    """

    costs: Costs | None = None
    receives: bool = False
    room: float | None = None
    policy: Policy | None = None
    rule: str = "hidden"
    choosing: bool = False
