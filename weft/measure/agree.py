"""All times that planning needs, measured where the store lacks them; afterwards every rank has the same."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch
from torch import fx

from weft.graph import is_step_node
from weft.measure.keys import op_key
from weft.measure.links import measure_links
from weft.measure.ops import measure_ops
from weft.measure.store import Store
from weft.measure.values import is_op
from weft.predict.costs import Costs, UpdateTimes
from weft.predict.links import Links, default_links
from weft.predict.roofline import Roofline, measure_roofline
from weft.run.collectives import Local
from weft.state.optimizer import group_options, run_step, shadow

Progress = Callable[[str], None]
UPDATE_ELEMENTS = (1 << 12, 1 << 20)
OPS_SECONDS = 20.0  # at most, for the ops of one step that the store lacks
UNKNOWN_UPDATE = UpdateTimes(1e-4, 2e-9)
NODE_SECONDS = 5e-6  # a step node that only looks something up


def measuring() -> bool:
    """Whether the environment lets anything be measured; else plans depend on nothing but the store."""
    return os.environ.get("WEFT_MEASURE", "1") != "0"


def agree_on_costs(
    nodes: Sequence[fx.Node],
    store: Store,
    collectives: Local,
    *,
    device: torch.device,
    memory_limit: int,
    largest: int,
    optimizer: torch.optim.Optimizer,
    fused: bool,
    graph: str,
    progress: Progress,
) -> Costs:
    """The costs of a step with these nodes; a collective call. Nothing of the model runs.

    With WEFT_MEASURE=0 in the environment, and where there are no ranks to measure with, what is not in the store is
    estimated. `graph` names the step: what earlier runs of it took, over what was predicted, scales its ops.
    """
    measures = collectives.name != "fake" and measuring()
    if measures:
        measure_ops(
            nodes,
            store,
            device=device,
            memory_limit=memory_limit,
            seconds=OPS_SECONDS,
            progress=lambda done, total: progress(f"op {done} of {total}"),
        )
    roofline = measure_roofline(device, store)
    update = _update_times(optimizer, fused, device, store)
    mine = {key: store.get("ops", key) for key in _keys(nodes)}
    scale = store.get("scales", graph) or 1.0
    answers = collectives.gather_objects(
        (mine, roofline.as_json(), (update.call_seconds, update.element_seconds), scale)
    )
    table = _medians(answer[0] for answer in answers)
    agreed = Roofline(**answers[0][1])
    links = _links(store, collectives, measures, device=device, largest=largest, progress=progress)
    store.save()

    parts = [sorted(table.items()), agreed.as_json(), links.to_json(), [list(answer[2]) for answer in answers]]

    def seconds(node: fx.Node) -> float:
        if not is_op(node):
            return NODE_SECONDS if is_step_node(node) else 0.0
        known = table.get(op_key(node))
        return agreed.seconds(node) if known is None else known

    return Costs(
        op=seconds,
        links=links,
        update=UpdateTimes(*(statistics.median(answer[2][part] for answer in answers) for part in (0, 1))),
        bytes_per_second=agreed.bytes_per_second,
        scale=float(answers[0][3]),
        source=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
    )


def _keys(nodes: Iterable[fx.Node]) -> set[str]:
    return {op_key(node) for node in nodes if is_op(node)}


def _medians(tables: Iterable[dict[str, float | None]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for table in tables:
        for key, seconds in table.items():
            if seconds is not None:
                values.setdefault(key, []).append(seconds)
    return {key: statistics.median(found) for key, found in values.items()}


def _links(
    store: Store,
    collectives: Local,
    measures: bool,
    *,
    device: torch.device,
    largest: int,
    progress: Progress,
) -> Links:
    """Those of the store, if the network is still as it was; else measured."""
    key = f"{collectives.name} {collectives.world}"

    def stored() -> Links | None:
        found = store.get("links", key)
        return None if found is None else Links.from_json(found)

    if not measures:
        return collectives.gather_objects(stored() or default_links(collectives.world))[0]
    links = measure_links(collectives, device=device, largest=largest, store_get=stored, progress=progress)
    store.put("links", key, links.to_json())
    return links


def _update_times(optimizer: torch.optim.Optimizer, fused: bool, device: torch.device, store: Store) -> UpdateTimes:
    """The optimizer's update on flat tensors of two sizes."""
    options = group_options(optimizer.param_groups[0])
    if fused:
        options["fused"] = True
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    key = f"{name} {sorted(k for k, value in options.items() if value is True)}"
    known = store.get("updates", key)
    if known is None:
        try:
            known = [_seconds_of_update(optimizer, options, elements, device) for elements in UPDATE_ELEMENTS]
        except Exception:  # one that needs whole tensors or a closure: it runs by itself after everything else
            return UNKNOWN_UPDATE
        store.put("updates", key, known)
    small, large = known
    rate = max((large - small) / (UPDATE_ELEMENTS[1] - UPDATE_ELEMENTS[0]), 0.0)
    return UpdateTimes(max(small - UPDATE_ELEMENTS[0] * rate, 0.0), rate)


def _seconds_of_update(
    optimizer: torch.optim.Optimizer, options: dict[str, object], elements: int, device: torch.device
) -> float:
    twin = shadow(optimizer)
    tensor = torch.zeros(elements, device=device)
    times = []
    for _ in range(7):
        tensor.grad = torch.ones(elements, device=device)
        _settle(device)
        start = perf_counter()
        run_step(twin, options, [tensor])
        _settle(device)
        times.append(perf_counter() - start)
    return statistics.median(times[2:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
