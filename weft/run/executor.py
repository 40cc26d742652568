"""Runs step graphs: one method a step node, over the state of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx, nn

from weft.graph import StepGraph
from weft.passes.lifetimes import GATHERED, buffer_dtype, buffer_numel, placement, received_numel
from weft.run.collectives import Local, Pending
from weft.state.arena import Arena
from weft.state.fragments import Fragment, Fragments
from weft.state.layout import Bucket, Layout
from weft.state.optimizer import group_options
from weft.state.shards import BucketState
from weft.trace.randomness import device_generator


class Program:
    """A step graph made callable, with its views of the arena."""

    def __init__(self, step: StepGraph, *, receives: bool) -> None:
        self.step = step
        root = nn.Module()
        for name, value in step.constants.items():
            root.register_buffer(name, value, persistent=False)
        self.module = fx.GraphModule(root, step.graph)
        self.forward: Callable[..., Any] = self.module.forward
        self.placement = placement(step, receives=receives)
        self.draws = any("random_key" in node.meta for node in step.graph.nodes)
        self.bound_to: torch.Tensor | None = None
        self.buffers: dict[str, dict[int, torch.Tensor]] = {}
        self.gathered_views: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        self.places: dict[tuple[int, int], torch.Tensor] = {}

    def bind(self, arena: Arena) -> None:
        """Make the views once; a steady step makes none."""
        arena.reserve(self.placement.nbytes)
        if self.bound_to is arena.memory:
            return
        self.bound_to = arena.memory
        self.places.clear()
        for (kind, index), offset in self.placement.offsets.items():
            bucket = self.step.layout.buckets[index]
            view = arena.view(offset, buffer_numel(kind, bucket), buffer_dtype(kind, bucket))
            self.buffers.setdefault(kind, {})[index] = view
            if kind in GATHERED:
                self.gathered_views[kind, index] = tuple(slot.view(view) for slot in bucket.slots)


class Executor:
    """The state of a rank and the step nodes' meaning on it."""

    def __init__(
        self,
        layout: Layout,
        states: Sequence[BucketState],
        collectives: Local,
        *,
        device: torch.device,
        groups: Callable[[int], Mapping[str, Any]],
        accumulate: int,
        clip_norm: float | None,
        parameter_count: int,
        buffers: Callable[[], Sequence[torch.Tensor]],
        random_state: torch.Tensor,
        fragments: Fragments | None = None,
    ) -> None:
        self.layout, self.states, self.collectives, self.device = layout, states, collectives, device
        self.groups, self.accumulate, self.clip_norm = groups, accumulate, clip_norm
        self.buffers = buffers
        self.fragments = fragments  # optimizer state in the next tier of memory
        self.arena = Arena(device)
        self.random_state = random_state
        self.poison = False  # fill released memory with NaN: a test's way to see a late reader
        self.scale = 1.0 / (collectives.world * accumulate)
        self.parameter_count = parameter_count
        self.program: Program
        self.gathers: dict[int, Pending] = {}
        self.gathered_as: dict[int, str] = {}  # which of its gathers in this program a bucket is at
        self.reductions: dict[int, Pending] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        # Sums that outlive a micro-step: whole gradients, this rank's slices of reduced ones, dormant buckets' own.
        self.sums: dict[int, torch.Tensor] = {}
        self.slice_sums: dict[int, torch.Tensor] = {}
        self.dormant_received: dict[int, torch.Tensor] = {}
        # Which parameters are reached; after them, which ranks have a loss that is not a number.
        self.reach_flags = torch.zeros(parameter_count + collectives.world, dtype=torch.uint8)
        self.reach_pending: Pending | None = None
        self.reached: frozenset[int] = frozenset()
        self.without_loss: tuple[int, ...] = ()  # ranks whose loss is not a number: the step is given up
        self.random_before = random_state
        self.buffers_before: dict[int, torch.Tensor] = {}
        self.rows: tuple[torch.Tensor, Pending] | None = None
        self.grad_norm: torch.Tensor | None = None
        self.coefficient: torch.Tensor | None = None
        self.random_positions: dict[int, torch.Tensor] = {}
        self.random_resume: torch.Tensor | None = None
        self.whole_update_due = False
        self.waited = 0.0  # seconds of this step in which the program waited for others

    # ---- a step ----

    def begin_step(self, reached: Sequence[bool], micro_batches: int) -> None:
        """Take note of the parameters that this rank's micro-batches reach."""
        self.scale = 1.0 / (self.collectives.world * micro_batches)
        self.reach_flags = torch.tensor([*reached, *[False] * self.collectives.world], dtype=torch.uint8)
        self.reached, self.without_loss = frozenset(), ()
        self.coefficient = None
        self.waited = 0.0
        self.random_before = self.random_state

    def __call__(self, program: Program, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run one micro-step."""
        program.bind(self.arena)
        self.program = program
        generator = device_generator(self.device) if program.draws else None
        outer = None
        if generator is not None:
            outer = generator.get_state()
            generator.set_state(self.random_state)
        try:
            # Nothing here requires grad, but some kernels (oneDNN's LSTM) keep what backward needs only in grad mode.
            trains = program.step.variant != "evaluate"
            with torch.set_grad_enabled(trains), torch.autocast(self.device.type, enabled=False):
                return program.forward(self, *inputs)
        finally:
            self.random_positions.clear()
            self.gathered_as.clear()
            if generator is not None and outer is not None:
                self.random_state = generator.get_state()
                generator.set_state(outer)

    def end_step(self) -> None:
        self.gradients.clear()
        for bucket in self.layout.buckets:
            if bucket.dormant:
                self.sums.pop(bucket.index, None)
        self.dormant_received.clear()
        if self.without_loss:
            self.random_state = self.random_before
            self._write_buffers(list(self.buffers_before), list(self.buffers_before.values()))
        self.buffers_before.clear()

    def _wait(self, pending: Pending, what: str) -> None:
        start = perf_counter()
        self.collectives.wait(pending, what)
        self.waited += perf_counter() - start

    def drain(self) -> None:
        """Wait for every gather in flight, and for optimizer state on its way out."""
        for index in list(self.gathers):
            self._finish_gather(index)
        if self.fragments is not None:
            self.fragments.drain()

    # ---- gathers ----

    def parameters(self, bucket: int) -> Sequence[torch.Tensor]:
        return self.states[bucket].views

    def gather(self, bucket: int) -> None:
        entry, state = self.layout.buckets[bucket], self.states[bucket]
        if not entry.sharded:
            if self._reached(entry):
                assert state.full is not None
                self.gathers[bucket] = self.collectives.gather(state.full, state.full[state.own], bucket)
            return
        kind = "regathered" if bucket in self.gathered_as else "gathered"
        self.gathered_as[bucket] = kind
        full = self.program.buffers[kind][bucket]
        shard = state.master
        if entry.compute != entry.master:
            shard = full[state.own]
            shard.copy_(state.master)
        self.gathers[bucket] = self.collectives.gather(full, shard, bucket)

    def _finish_gather(self, bucket: int) -> None:
        pending = self.gathers.pop(bucket, None)
        if pending is not None:
            self._wait(pending, f"the gather of {self.layout.buckets[bucket].describe()}")

    def await_gather(self, bucket: int) -> Sequence[torch.Tensor]:
        self._finish_gather(bucket)
        if self.layout.buckets[bucket].sharded:
            return self.program.gathered_views[self.gathered_as[bucket], bucket]
        return self.states[bucket].views

    def release(self, bucket: int) -> None:
        if self.poison:
            self.program.buffers[self.gathered_as[bucket]][bucket].fill_(float("nan"))

    # ---- gradients ----

    def _staged(self, bucket: int) -> torch.Tensor:
        """The buffer in which a bucket's gradients come together in this program."""
        entry = self.layout.buckets[bucket]
        if entry.dormant or (self.accumulate > 1 and not entry.reduce_often):
            if bucket not in self.sums:
                self.sums[bucket] = torch.zeros(entry.numel, dtype=entry.reduce, device=self.device)
            return self.sums[bucket]
        return self.program.buffers["staged"][bucket]

    def clear(self, bucket: int, slots: Sequence[int]) -> None:
        entry = self.layout.buckets[bucket]
        if entry.dormant and bucket not in self.sums:
            return  # nothing is staged before somebody reaches it, and then into zeros
        flat = self._staged(bucket)
        for start, stop in entry.gaps:
            flat[start:stop].zero_()
        for slot in slots:
            flat[entry.slots[slot].offset : entry.slots[slot].end].zero_()

    def staged(self, bucket: int, slot: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        places = self.program.places
        place = places.get((bucket, slot))
        if place is None:
            entry = self.layout.buckets[bucket]
            flat = self._staged(bucket)[entry.slots[slot].offset : entry.slots[slot].end]
            place = flat.as_strided(shape, stride)
            if not entry.dormant:
                places[bucket, slot] = place
        return place

    def stage(self, bucket: int, slot: int, gradient: torch.Tensor, add: bool) -> None:
        place = self.layout.buckets[bucket].slots[slot].view(self._staged(bucket))
        if add:
            place.add_(gradient)
        else:
            place.copy_(gradient)

    def reduce(self, bucket: int) -> None:
        entry = self.layout.buckets[bucket]
        if not self._reached(entry):
            return
        staged = self._staged(bucket)
        if entry.scatter:
            self.reductions[bucket] = self.collectives.reduce_scatter(self._received(bucket, staged), staged, bucket)
        else:
            self.reductions[bucket] = self.collectives.all_reduce(staged)

    def _received(self, bucket: int, staged: torch.Tensor) -> torch.Tensor | None:
        if not self.collectives.receives:
            return None
        if self.layout.buckets[bucket].dormant:
            self.dormant_received[bucket] = staged.new_empty(received_numel(self.layout.buckets[bucket]))
            return self.dormant_received[bucket]
        return self.program.buffers["received"][bucket]

    def await_reduce(self, bucket: int) -> None:
        entry = self.layout.buckets[bucket]
        pending = self.reductions.pop(bucket, None)
        if pending is None:
            return  # dormant, and no rank reached it
        self._wait(pending, f"the reduction of {entry.describe()}")
        result = self._staged(bucket)
        if entry.scatter:
            received = self.dormant_received.get(bucket, self.program.buffers.get("received", {}).get(bucket))
            result = self.collectives.scattered(received, result)
        step = self.program.step
        if entry.reduce_often and self.accumulate > 1:
            result = self._add_slice(bucket, result, first=step.variant in ("first", "only"))
        elif bucket in self.program.buffers.get("slice", {}):
            result = self.program.buffers["slice"][bucket].copy_(result)
        if step.updates and self.scale != 1.0:
            result.mul_(self.scale)
        self.gradients[bucket] = result

    def _add_slice(self, bucket: int, result: torch.Tensor, first: bool) -> torch.Tensor:
        if bucket not in self.slice_sums:
            self.slice_sums[bucket] = torch.empty_like(result)
        return self.slice_sums[bucket].copy_(result) if first else self.slice_sums[bucket].add_(result)

    # ---- reach, norm, update ----

    def _reached(self, bucket: Bucket) -> bool:
        """Whether a dormant bucket takes part in this step; all others always do."""
        return not bucket.dormant or any(slot.parameter in self.reached for slot in bucket.slots)

    def announce(self, loss: torch.Tensor) -> None:
        # On a GPU the host would have to wait for the value, and the device for the host.
        if self.device.type == "cpu" and torch.isnan(loss):
            self.reach_flags[self.parameter_count + self.collectives.rank] = 1
        if self.program.step.updates:
            self.reach_pending = self.collectives.start_reach(self.reach_flags)

    def await_reach(self) -> None:
        assert self.reach_pending is not None
        self._wait(self.reach_pending, "the agreement on which parameters were reached")
        found = torch.nonzero(self.reach_flags).flatten().tolist()
        self.reached = frozenset(index for index in found if index < self.parameter_count)
        self.without_loss = tuple(index - self.parameter_count for index in found if index >= self.parameter_count)

    def norm(self) -> None:
        squares = torch.zeros(self.parameter_count, dtype=torch.float64, device=self.device)
        # Slices of one parameter lie on several ranks; where the update is replicated every rank has all of it, and
        # rank 0 counts it.
        scattered = any(self.layout.buckets[bucket].scatter for bucket in self.gradients)
        for bucket, gradient in self.gradients.items():
            entry, own = self.layout.buckets[bucket], self.states[bucket].own
            if scattered and not entry.scatter and self.collectives.rank:
                continue
            for slot in entry.slots:
                start, stop = max(slot.offset, own.start), min(slot.end, own.stop)
                if start < stop and slot.parameter in self.reached:
                    piece = gradient[start - own.start : stop - own.start]
                    dtype = torch.float32 if piece.element_size() < 4 else None
                    squares[slot.parameter] = torch.linalg.vector_norm(piece, dtype=dtype).double().square()
        self.rows = self.collectives.start_rows(squares) if scattered else None
        self.grad_norm = squares

    def await_norm(self) -> None:
        assert self.grad_norm is not None
        assert self.clip_norm is not None
        squares = self.grad_norm
        if self.rows is not None:
            rows, pending = self.rows
            self._wait(pending, "the gradient norm")
            squares = rows[0].clone()
            for row in rows[1:]:
                squares += row
            self.rows = None
        self.grad_norm = squares.sum().sqrt()
        self.coefficient = torch.clamp(self.clip_norm / (self.grad_norm + 1e-6), max=1.0)

    def update(self, bucket: int) -> None:
        entry, state = self.layout.buckets[bucket], self.states[bucket]
        gradient = self.gradients.pop(bucket, None)
        if gradient is None or self.without_loss:
            return  # dormant, and no rank reached it; or the step is given up, and all its collectives still run
        if self.coefficient is not None:
            gradient.mul_(self.coefficient)
        assert state.optimizer is not None
        assert entry.group is not None
        state.optimizer.step(gradient.to(entry.master), self.reached, group_options(self.groups(entry.group)))
        state.refresh()
        if state.fragment is not None:
            state.fragment.changed = True

    def reload(self, bucket: int) -> None:
        self._fragment(bucket).reload()

    def await_reload(self, bucket: int) -> None:
        self._fragment(bucket).await_reload()

    def offload(self, bucket: int) -> None:
        self._fragment(bucket).offload()

    def _fragment(self, bucket: int) -> Fragment:
        fragment = self.states[bucket].fragment
        assert fragment is not None
        return fragment

    def update_whole(self) -> None:
        """The update itself is the caller's: it may need the loss, or to run the step again."""
        self.whole_update_due = not self.without_loss

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        """Per parameter that was reached, its whole reduced gradient."""
        found = {}
        for bucket, gradient in self.gradients.items():
            if self.coefficient is not None:
                gradient.mul_(self.coefficient)
            for slot in self.layout.buckets[bucket].slots:
                if slot.parameter in self.reached:
                    found[slot.parameter] = slot.view(gradient)
        return found

    # ---- randomness and buffers ----

    def keep_random(self, key: int) -> None:
        self.random_positions[key] = device_generator(self.device).get_state()

    def rewind_random(self, key: int) -> None:
        generator = device_generator(self.device)
        self.random_resume = generator.get_state()
        generator.set_state(self.random_positions[key])

    def resume_random(self) -> None:
        assert self.random_resume is not None
        device_generator(self.device).set_state(self.random_resume)

    def write_buffers(self, indices: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        if self.without_loss:
            return
        if self.accumulate > 1 and self.program.step.variant != "evaluate":
            buffers = self.buffers()  # a later micro-batch may end the step
            for index in indices:
                if index not in self.buffers_before:
                    self.buffers_before[index] = buffers[index].clone()
        self._write_buffers(indices, values)

    def _write_buffers(self, indices: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        buffers = self.buffers()
        for index, value in zip(indices, values, strict=True):
            buffers[index].copy_(value)
