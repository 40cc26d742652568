"""Measure what each distinct op of a step takes, alone, with inputs of its own.

What an op takes depends on where its inputs lie. In a step most were written a little earlier and are still in the
cache; weights, and what backward takes from forward, come from memory. So ops are not repeated one by one: all of a
group run in turn, each after those of its inputs that a step would find in the cache have been written again, oldest
first. The others have been driven out by then, by the rest of the group or on purpose.

Each number that follows was chosen by comparing, node by node, with what ops took inside of real steps.
"""

from __future__ import annotations

import operator
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import fx

from weft.graph import staged
from weft.measure.clock import cache_bytes, timed
from weft.measure.inputs import Call, Maker
from weft.measure.keys import op_key
from weft.measure.store import Store
from weft.measure.values import is_op, is_view, tensors_of
from weft.trace.randomness import device_generator

Progress = Callable[[int, int], None]

GROUP_BYTES = 512 << 20  # what a group of ops that run in turn may take
REPETITIONS = ((20e-3, 3), (2e-3, 5), (2e-4, 9), (0.0, 15))  # of an op that takes at least so many seconds
HELD = 4  # results kept alive: the next op does not get the memory that was written a moment ago
VERY_SLOW = 0.5  # seconds from which on the first run counts
IN_A_ROW = 2  # views come in twos and threes: only the first finds PyTorch's own code driven out of the cache


@dataclass
class _Op:
    """A distinct op; `warm` are the inputs that a step finds in the cache, the one written last at the end."""

    key: str
    node: fx.Node
    nbytes: int
    view: bool
    warm: tuple[int, ...] = ()
    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    call: Call | None = None
    broken: bool = False
    once: bool = False  # so slow that the first run, with all that is made then, tells enough

    def wanted(self) -> int:
        quickest = min(self.seconds, default=0.0)
        return next(count for least, count in REPETITIONS if quickest >= least)

    @property
    def done(self) -> bool:
        return self.broken or self.once or len(self.seconds) >= self.wanted()


def measure_ops(
    nodes: Iterable[fx.Node],
    store: Store,
    *,
    device: torch.device,
    memory_limit: int,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Seconds of every distinct op of a step, by `op_key`; what the store lacks is measured and put there.

    Ops that need more than `memory_limit` bytes, or fail alone, are not in the result. With `seconds` measuring ends
    after about as long; what was not reached then is not in the result either. `nodes` are in the order of the step.
    """
    nodes = list(nodes)
    found: dict[str, float] = {}
    missing: dict[str, fx.Node] = {}
    keys: dict[fx.Node, str] = {}
    for node in nodes:
        if not is_op(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        key = keys[node] = op_key(node)
        if key in found or key in missing or key in store.failed:
            continue
        known = store.get("ops", key)
        if known is None:
            missing[key] = node
        else:
            found[key] = float(known)
    wanted: list[_Op] = []
    for key, node in missing.items():
        need = bytes_needed(node)
        if need <= memory_limit:
            wanted.append(_Op(key, node, need, is_view(node)))
    if not wanted:
        return found
    warmth = _warmth(nodes, keys, {op.key for op in wanted}, cache_bytes(device) // 2)
    for op in wanted:
        op.warm = warmth.get(op.key, ())
    deadline = None if seconds is None else perf_counter() + seconds
    done = 0
    for group in _groups(wanted, min(memory_limit, GROUP_BYTES)):
        _measure_group(group, device, memory_limit, deadline, partial(_report, progress, done, len(wanted)))
        for op in group:
            if op.broken:
                store.failed.add(op.key)
            elif op.seconds:
                found[op.key] = statistics.median(op.seconds)
                store.put("ops", op.key, found[op.key])
                if device.type == "cuda":
                    store.put("dispatch", op.key, statistics.median(op.host))
        done += len(group)
        _report(progress, 0, len(wanted), done)
        if deadline is not None and perf_counter() > deadline:
            break
    return found


def bytes_needed(node: fx.Node) -> int:
    """Bytes of an op's inputs and outputs."""
    outputs = [] if is_view(node) else tensors_of(node)
    inputs = [spec for source in node.all_input_nodes for spec in tensors_of(source)]
    return sum(spec.extent * spec.dtype.itemsize for spec in (*inputs, *outputs))


def _groups(ops: Sequence[_Op], limit: int) -> Iterable[list[_Op]]:
    group: list[_Op] = []
    total = 0
    for op in ops:
        if group and total + op.nbytes > limit:
            yield group
            group, total = [], 0
        group.append(op)
        total += op.nbytes
    if group:
        yield group


def _warmth(nodes: Sequence[fx.Node], keys: dict[fx.Node, str], wanted: set[str], cache: int) -> dict[str, Any]:
    """By key, the positions of an op's inputs that a step finds in the cache, as most nodes with that key have it."""
    votes: dict[str, Counter[tuple[int, ...]]] = {}
    touched: dict[Any, int] = {}  # by the node that made a tensor: what had been touched by then, in bytes
    clock = 0
    roots: dict[fx.Node, Any] = {}

    def root(node: fx.Node) -> Any:
        """The node whose memory a view, or an item of several results, lies in."""
        if node not in roots:
            source = node.args[0] if node.op == "call_function" and node.args else None
            lies_in = isinstance(source, fx.Node) and (
                is_view(node) or (node.target is operator.getitem and is_view(source))
            )
            roots[node] = root(source) if lies_in else node  # type: ignore[arg-type]
        return roots[node]

    for node in nodes:
        inputs = node.all_input_nodes
        if node in keys and not is_view(node):
            ages = [
                (clock - touched[root(source)], position)
                for position, source in enumerate(inputs)
                if root(source) in touched and source.target is not staged
            ]
            warm = tuple(position for age, position in sorted(ages, reverse=True) if age < cache)
            if keys[node] in wanted:
                votes.setdefault(keys[node], Counter())[warm] += 1
            for source in inputs:
                touched[root(source)] = clock
                clock += sum(spec.nbytes for spec in tensors_of(source))
            clock += sum(spec.nbytes for spec in tensors_of(node))
            touched[node] = clock
        elif node.target is operator.getitem and inputs[0] in touched:
            touched[node] = touched[inputs[0]]  # an item of several results
    return {key: counted.most_common(1)[0][0] for key, counted in votes.items()}


def _report(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress is not None:
        progress(before + done, total)


def _measure_group(
    ops: Sequence[_Op],
    device: torch.device,
    memory_limit: int,
    deadline: float | None,
    report: Callable[[int], None],
) -> None:
    maker = Maker(device)
    generators = {torch.default_generator, device_generator(device)}
    saved = [(generator, generator.get_state()) for generator in generators]
    held: deque[Any] = deque(maxlen=HELD)
    taken = sum(op.nbytes for op in ops)
    largest = max(op.nbytes for op in ops)
    if taken + HELD * largest > memory_limit:
        held = deque(maxlen=0)
    else:
        taken += HELD * largest
    spare = max(0, min(2 * cache_bytes(device), memory_limit - taken))

    def late() -> bool:
        return deadline is not None and perf_counter() > deadline

    # Some kernels (oneDNN's LSTM) keep what backward needs only in grad mode, in which a step runs them too.
    try:
        with torch.set_grad_enabled(True), torch.autocast(device.type, enabled=False):
            for op in ops:
                if late():
                    break
                _prepare(op, maker, device)
            evictor = None
            if spare and (device.type != "cpu" or sum(op.nbytes for op in ops) < 2 * cache_bytes(device)):
                evictor = torch.zeros(spare // 8, dtype=torch.int64, device=device)
            while waiting := [op for op in ops if op.call is not None and not op.done]:
                if evictor is not None and device.type == "cpu":
                    evictor.bitwise_or_(0)
                    evictor[:1].add(1)  # brings back PyTorch's own code, which that has driven out as well
                for op in waiting:
                    if evictor is not None and device.type != "cpu":
                        evictor.bitwise_or_(0)  # keeps the device busy, too, until the op has been issued
                    _run(op, device, held)
                    if late():
                        return
                report(sum(op.done for op in ops))
    finally:
        held.clear()
        for op in ops:
            op.call = None
        for generator, state in saved:
            generator.set_state(state)


def _prepare(op: _Op, maker: Maker, device: torch.device) -> None:
    """Make arguments and run once, which is not counted: kernels are looked up and memory is mapped."""
    try:
        op.call = maker.call(op.node)
        seconds, host, _ = timed(op.call, device)
    except Exception:  # whatever it is: the time of this op is estimated then
        op.broken, op.call = True, None
        return
    if seconds >= VERY_SLOW:
        op.seconds, op.host, op.once = [seconds], [host], True


def _run(op: _Op, device: torch.device, held: deque[Any]) -> None:
    assert op.call is not None
    call: Callable[[], Any] = op.call
    count = IN_A_ROW if op.view else 1
    if op.view:
        call = partial(_several, op.call)
    inputs = op.node.all_input_nodes
    for position in op.warm:
        memory = op.call.memory.get(inputs[position])
        if memory is not None:
            memory.touch()
    try:
        seconds, host, result = timed(call, device)
    except Exception:
        op.broken = True
        return
    op.seconds.append(seconds / count)
    op.host.append(host / count)
    held.append(result)


def _several(call: Call) -> None:
    for _ in range(IN_A_ROW):
        call()
