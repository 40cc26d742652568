"""Bring optimizer state back ahead of its update, so that the copies hide behind backward and the other updates."""

from __future__ import annotations

from torch import fx

from weft import graph as g
from weft.graph import PassReport, StepGraph, written_by
from weft.passes.context import PlanContext


def overlap_copies(step: StepGraph, context: PlanContext, earliest: fx.Node | None = None) -> PassReport:
    """Move every reload to where the memory for it is free.

    The first ones, as many as fit in memory, go behind `earliest` (the end of forward, if it is not given), each of
    the others behind the offload that frees its block. Their order stays.
    """
    nodes = list(step.graph.nodes)
    reloads = [node for node in nodes if node.target is g.reload]
    offloads = [node for node in nodes if node.target is g.offload]
    if not reloads:
        return PassReport("offload", "no optimizer state is offloaded")
    place = earliest or next(node for node in nodes if node.target is g.announce)
    position = {node: index for index, node in enumerate(nodes)}
    for index, reload in enumerate(reloads):
        if index >= step.layout.offload_window:
            place = offloads[index - step.layout.offload_window]
        if position[place] < position[reload] and place.next is not reload:
            place.append(reload)
            written_by(reload, "offload")
        place = reload
    window = min(step.layout.offload_window, len(reloads))
    return PassReport(
        "offload",
        f"{len(reloads)} fragments of optimizer state come in ahead of their updates, {window} in memory at a time",
    )
