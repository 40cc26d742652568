"""Make a traced graph functional, compare two of them, and drop the nodes that compute nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.func import functionalize as torch_functionalize

from weft._torch import make_fx, op_schema
from weft.trace.randomness import is_random

aten = torch.ops.aten
# Where PyTorch and weft lie: their frames are not the user's.
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def is_mutating(node: fx.Node) -> bool:
    schema = op_schema(node.target)
    return schema is not None and schema.is_mutable


def mutating_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_mutating(node)]


def functionalize(traced: fx.GraphModule, arguments: Any, keys: Sequence[int]) -> fx.GraphModule:
    """The same computation without in-place ops; changed inputs are written back by `copy_` at the end."""
    result = make_fx(torch_functionalize(traced, remove="mutations"))(*arguments)
    set_random_keys(result.graph, keys)
    return result


def set_random_keys(graph: fx.Graph, keys: Sequence[int]) -> None:
    """Give each random op the key it had when it was traced."""
    drawing = [node for node in graph.nodes if is_random(node.target, node.args, node.kwargs)]
    assert len(drawing) == len(keys), f"{len(drawing)} random ops in the graph, {len(keys)} were traced"
    for node, key in zip(drawing, keys, strict=True):
        node.meta["random_key"] = key


@dataclass(frozen=True)
class Difference:
    """Where two traces of one step part, in words."""

    index: int
    text: str


def constants_of(traced: fx.GraphModule) -> dict[str, Any]:
    """The tensors that a trace took over as they were."""
    return {node.target: getattr(traced, node.target) for node in traced.graph.find_nodes(op="get_attr")}


def first_difference(
    first: fx.Graph, second: fx.Graph, constants: Mapping[str, Any], second_constants: Mapping[str, Any]
) -> Difference | None:
    """The first node in which two traces differ, constants' values included; None if they are equal."""
    position = {node: index for index, node in enumerate(first.nodes)}
    position |= {node: index for index, node in enumerate(second.nodes)}

    def comparable(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", position[value])
        if isinstance(value, (list, tuple)):
            return tuple(comparable(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, comparable(item)) for key, item in value.items())
        if isinstance(value, slice):
            return (value.start, value.stop, value.step)
        return (type(value), str(value))

    for index, (one, two) in enumerate(zip(first.nodes, second.nodes, strict=False)):
        if one.op == "get_attr" and two.op == "get_attr":
            if not _same_constant(constants[one.target], second_constants[two.target]):
                return Difference(index, f"the constant tensor {one.name} has other values at a second look")
            continue
        if (one.op, one.target) != (two.op, two.target):
            return Difference(index, f"{_short(one)} at one time, {_short(two)} at another")
        if comparable((one.args, one.kwargs)) != comparable((two.args, two.kwargs)):
            return Difference(
                index, f"{one.target}{_plain(one.args)} at one time, {two.target}{_plain(two.args)} at another"
            )
    if len(first.nodes) != len(second.nodes):
        count = min(len(first.nodes), len(second.nodes)) - 1
        return Difference(count, f"{len(first.nodes)} operations at one time, {len(second.nodes)} at another")
    return None


def _same_constant(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return one is two or bool(one == two)
    if one is two:
        return True
    if type(one) is not type(two) or one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one, two) or bool(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True))


def _short(node: fx.Node) -> str:
    return str(node.target)


def _plain(args: Any) -> str:
    return "(" + ", ".join(str(arg) for arg in args) + ")"


def last_user_line(trace: str) -> str | None:
    """The innermost line of a formatted stack trace that is neither PyTorch's nor ours, as file:line: code."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    theirs = [frame for frame in frames if not frame[0].startswith((*OURS, "<"))]
    return f"{theirs[-1][0]}:{theirs[-1][1]}: {theirs[-1][2]}" if theirs else None


def user_line(node: fx.Node) -> str:
    """The user's line that a node, or the nearest one before it, came from."""
    current: fx.Node = node
    while current.op != "root":
        found = last_user_line(current.meta.get("stack_trace") or "")
        if found is not None:
            return found
        current = current.prev
    return "a line that is not known"


def simplify(traced: fx.GraphModule, labels: Sequence[str], inputs: int) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Copy into a plain graph with readable names, without detaches, double transposes and unused nodes.

    Placeholders are named by `labels`; the last `inputs` of them are the batch, those before parameters and buffers.

    The first output is the loss, detached by the last op of forward: what comes after it is marked as backward.
    """
    graph = fx.Graph()
    constants: dict[str, torch.Tensor] = {}
    env: dict[fx.Node, Any] = {}
    waiting = iter(labels)
    output = traced.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    loss_marker = results[0]
    after_loss = False
    used = _live_nodes(traced.graph)
    states: set[fx.Node] = set(traced.graph.find_nodes(op="placeholder")[: len(labels) - inputs])

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(_identifier(next(waiting)))
            env[node].meta = dict(node.meta)
            continue
        if node.op == "output":
            break
        if node not in used:
            continue
        if node.target in IDENTITIES:
            env[node] = env[node.args[0]]
            after_loss = after_loss or node is loss_marker
            continue
        if _writes_back_state(node, states):
            continue
        if node.op == "get_attr":
            value = getattr(traced, node.target)
            name = f"constant_{len(constants)}"
            constants[name] = value
            env[node] = graph.create_node("get_attr", name, name=name)
            env[node].meta = dict(node.meta)
            continue
        if node.target is aten.t.default:
            source = env[node.args[0]]
            if source.op == "call_function" and source.target is aten.t.default:
                env[node] = source.args[0]
                continue
        copied = graph.node_copy(node, lambda n: env[n])
        env[node] = copied
        copied.meta["backward"] = after_loss
        if copied.target is aten.view.default:
            # Some kernels return other strides than their fake ones say (batch norm of a transposed input), and what is
            # a view of those may not be one of these; where it is one, `reshape` is that view.
            copied.target = aten.reshape.default
    values = [env[value] if isinstance(value, fx.Node) else value for value in results]
    graph.output(values)
    _remove_unused(graph)
    return graph, constants


def _writes_back_state(node: fx.Node, states: set[fx.Node]) -> bool:
    """Whether this is functionalization's closing `copy_` into a buffer: its new value is an output anyway."""
    return node.target is aten.copy_.default and node.args[0] in states


def _live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose result or effect matters."""
    live: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in live or has_effect(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def has_effect(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    # An unused draw still moves the generator, as it does in eager.
    return is_mutating(node) or node.is_impure() or is_random(node.target, node.args, node.kwargs)


def _remove_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def _identifier(label: str) -> str:
    name = re.sub(r"\W", "_", label)
    return name if name.isidentifier() else f"p_{name}"
