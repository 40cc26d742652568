"""A rank's memory through a step, as planned: what it keeps, the arena, the programs' values and the updates.

Nothing is run. The arena is one block as large as the hungriest program needs, so it counts in full all the time;
`transient_curve` says how much of it is in use where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft import graph as g
from weft.graph import StepGraph, bucket_of
from weft.passes.lifetimes import leases, placement, received_numel
from weft.simulate.activations import Curve, activation_curve, add_up, returned_bytes, spans
from weft.simulate.heap import heap_bytes
from weft.state.layout import Bucket, Layout, ParameterInfo

STATE = "parameters and optimizer state"
SUMS = "gradient sums"
ARENA = "buffers within the step (arena)"
ACTIVATIONS = "activations"
UPDATE = "update"
HEAP = "gaps in the heap"
PROGRAMS = "the programs themselves"

NODE_BYTES = 4096  # what a node of a graph, its fake tensor and its line of code take in Python's memory


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of a rank while each node of a step runs: the programs of its micro-steps, one after the other."""

    nbytes: Curve
    by_part: dict[str, Curve]
    names: tuple[str, ...]  # of the nodes

    @property
    def peak(self) -> int:
        """The position at which most is needed, the first of them."""
        return int(np.argmax(self.nbytes))

    @property
    def peak_bytes(self) -> int:
        return int(self.nbytes[self.peak])

    @property
    def peak_node(self) -> str:
        return self.names[self.peak]

    @property
    def parts(self) -> dict[str, int]:
        """What the peak consists of."""
        return {part: int(curve[self.peak]) for part, curve in self.by_part.items()}


def predict_memory(
    programs: Sequence[StepGraph],
    layout: Layout,
    *,
    state_elements: float,
    update_elements: float,
    accumulate: int,
    receives: bool,
    loose_bytes: int = 0,
    buffer_bytes: int = 0,
    cpu: bool = True,
    heap: bool = True,
) -> MemoryCurve:
    """The memory of one step, in steady state.

    Args:
        programs: those of the step's micro-steps, in order.
        layout: the buckets.
        state_elements: elements of optimizer state per parameter's, from the optimizer's probe.
        update_elements: elements of temporaries per updated parameter's, from `update.update_elements`.
        accumulate: micro-steps a step may have.
        receives: whether a reduce-scatter needs a second buffer, from the collectives.
        loose_bytes: of parameters that are in no bucket, from `loose_bytes`.
        buffer_bytes: of the model's buffers.
        cpu: whether Python's memory is the device's: then the programs count, as objects.
        heap: whether values come from glibc's heap (see weft/run/allocator.py): then the gaps between them count.
    """
    starts = np.cumsum([0, *(len(step.graph.nodes) for step in programs)])
    length = int(starts[-1])
    kept = state_bytes(layout, state_elements) + loose_bytes + buffer_bytes
    arena = max(placement(step, receives=receives).nbytes for step in programs)
    activations = np.concatenate([activation_curve(step) for step in programs])
    for step, end in zip(programs[:-1], starts[1:-1], strict=True):
        activations[end:] += returned_bytes(step)
    if accumulate > 1 and buffer_bytes:
        # A later micro-batch may end the step: what the buffers held before it is kept until its end.
        writes = _positions(programs, (g.write_buffers,))
        if writes:
            activations[writes[0][0] :] += buffer_bytes
    sums = np.full(length, sum_bytes(layout, accumulate), dtype=np.int64) + _dormant_sums(programs, layout, receives)
    updates = np.zeros(length, dtype=np.int64)
    for position, index in _positions(programs, (g.update,)):
        updates[position] = update_bytes(layout.buckets[index], update_elements)
    gaps = program_bytes = 0
    if cpu:
        program_bytes = NODE_BYTES * sum(len(graph.nodes) for graph in {step.graph for step in programs})
    if cpu and heap:
        most = max(heap_bytes(spans(step), len(step.graph.nodes)) for step in programs)
        gaps = max(0, most - max(int(activation_curve(step).max()) for step in programs))
    by_part = {
        STATE: np.full(length, kept, dtype=np.int64),
        SUMS: sums,
        ARENA: np.full(length, arena, dtype=np.int64),
        ACTIVATIONS: activations,
        UPDATE: updates,
        HEAP: np.full(length, gaps, dtype=np.int64),
        PROGRAMS: np.full(length, program_bytes, dtype=np.int64),
    }
    names = tuple(node.name for step in programs for node in step.graph.nodes)
    return MemoryCurve(np.sum(list(by_part.values()), axis=0), by_part, names)


def state_bytes(layout: Layout, state_elements: float) -> int:
    """What a rank keeps of all buckets between steps."""
    return layout.kept_bytes(state_elements)


def sum_bytes(layout: Layout, accumulate: int) -> int:
    """Sums of gradients that outlive a micro-step; the executor keeps them between steps too."""
    if accumulate == 1:
        return 0
    # Of a bucket that is reduced in every micro-step the rank keeps what it updates, of any other the whole.
    return sum(
        (_owned(bucket) if bucket.reduce_often else bucket.numel) * bucket.reduce.itemsize
        for bucket in layout.buckets
        if bucket.trained and not bucket.dormant
    )


def update_bytes(bucket: Bucket, update_elements: float) -> int:
    """What the optimizer takes while it updates a bucket: the gradient in the master dtype, and temporaries."""
    cast = 0 if bucket.reduce == bucket.master else 1
    return int(_owned(bucket) * bucket.master.itemsize * (cast + update_elements))


def loose_bytes(parameters: Sequence[ParameterInfo], layout: Layout) -> int:
    """Parameters that stay where the user put them, and their copies in the compute dtype while a program runs."""
    return sum(
        p.numel * (p.dtype.itemsize + (0 if p.compute == p.dtype else p.compute.itemsize))
        for p in parameters
        if p.index not in layout.slot_of
    )


def transient_curve(step: StepGraph, *, receives: bool) -> Curve:
    """Bytes of the arena in use while each node of a program runs: where a buffer more would fit."""
    found = leases(step, receives=receives)
    return add_up(((lease.nbytes, lease.start, lease.stop) for lease in found), len(step.graph.nodes))


def _owned(bucket: Bucket) -> int:
    """Elements of a bucket that this rank updates."""
    return bucket.slice_numel if bucket.scatter else bucket.numel


def _positions(programs: Sequence[StepGraph], targets: tuple[object, ...]) -> list[tuple[int, int]]:
    """(position in the step, second argument: mostly the bucket) of all nodes of these kinds."""
    nodes = [node for step in programs for node in step.graph.nodes]
    return [
        (position, bucket_of(node))
        for position, node in enumerate(nodes)
        if node.op == "call_function" and node.target in targets
    ]


def _dormant_sums(programs: Sequence[StepGraph], layout: Layout, receives: bool) -> Curve:
    """A bucket that the layout's own trace does not reach gets buffers when a program does, until the step's end."""
    length = sum(len(step.graph.nodes) for step in programs)
    first: dict[int, int] = {}
    for position, index in _positions(programs, (g.stage, g.staged)):
        if layout.buckets[index].dormant:
            first.setdefault(index, position)
    extra = [(layout.buckets[index].bytes(layout.buckets[index].reduce), at, length - 1) for index, at in first.items()]
    for position, index in _positions(programs, (g.reduce,)):
        bucket = layout.buckets[index]
        if index in first and bucket.scatter and receives:
            extra.append((received_numel(bucket) * bucket.reduce.itemsize, position, length - 1))
    return add_up(extra, length)
