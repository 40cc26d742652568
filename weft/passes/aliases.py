"""Which nodes share memory, and which are computed from parameters alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from weft._torch import storage_key
from weft.graph import is_step_node
from weft.trace.functional import has_effect


def storages(node: fx.Node) -> set[int]:
    """The storages that a node's value lies in, by the fake tensors of the trace."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {storage_key(item) for item in values if isinstance(item, torch.Tensor)}


def aliases(node: fx.Node) -> set[fx.Node]:
    """The node and everything computed from it that lies in its memory."""
    found = {node}
    waiting = [node]
    mine = storages(node)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.op == "call_function" and not is_step_node(user) and storages(user) & mine:
                found.add(user)
                waiting.append(user)
    return found


def derived_from(sources: Iterable[fx.Node], graph: fx.Graph, neutral: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Nodes computed from `sources` alone (and constants, sizes and `neutral` nodes): they can be computed again."""
    base = set(sources)
    free = set(neutral)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            free.add(node)
        if node.op != "call_function" or is_step_node(node) or has_effect(node):
            continue
        inputs = node.all_input_nodes
        if not inputs or not storages(node):  # a size takes no memory
            free.add(node)
        elif all(source in base or source in found or source in free for source in inputs):
            if any(source in base or source in found for source in inputs):
                found.add(node)
            else:
                free.add(node)
    return found
