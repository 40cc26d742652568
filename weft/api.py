"""`weft.compile` and the `Step` that it returns."""

from __future__ import annotations

import atexit
import statistics
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from time import perf_counter
from typing import Any

import torch
from torch import nn

from weft._torch import mark_stepped, plain_tensor_access, pytree
from weft.errors import LossError, ShardedError
from weft.graph import StepGraph, Variant
from weft.measure.agree import measuring
from weft.measure.store import default_folder
from weft.options import Options, Precision, budget_bytes, check_options
from weft.passes.candidate import memory_of, timeline_of
from weft.passes.context import PlanContext
from weft.passes.pipeline import build_program
from weft.plans.measured import NEAR, WRONG, Measured, links_factor, scaled_compute
from weft.plans.planner import Planned, Planner
from weft.predict.costs import Costs
from weft.report.plan import Plan
from weft.report.progress import Progress
from weft.run.allocator import keep_heap, map_large_blocks
from weft.run.collectives import Local, connect, leave, peers_lost
from weft.run.executor import Executor, Program
from weft.simulate.timeline import Timeline
from weft.simulate.update import update_elements
from weft.state import checkpoint
from weft.state.checks import ModelTree, buffer_slots, check_model, check_optimizer, dense_stride
from weft.state.layout import Layout, ParameterInfo
from weft.state.materialise import FirstValues
from weft.state.offload import make_fragments
from weft.state.optimizer import Probe, group_options, needs_closure, probe
from weft.state.parameters import manage, placeholder, unguarded
from weft.state.shards import BucketState, return_freed_memory
from weft.trace.ambient import Ambient
from weft.trace.capture import Loss, ParameterSpec, Trace, capture, default_loss
from weft.trace.known import Known, KnownTraces
from weft.trace.randomness import device_generator
from weft.trace.signature import BatchSpec, check_batch_device, split_batch, structure_of
from weft.trace.sizes import OpenDims


def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss | None = None,
    *,
    mode: str = "auto",
    memory: int | float | str | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision | None = None,
    fuse: str = "auto",
    offload: str | PathLike[str] = "auto",
    passes: Mapping[str, Any] | None = None,
    seed: int | None = None,
    cache_dir: str | PathLike[str] | None = None,
    mesh: Any = None,
    timeout: float | timedelta = 600.0,
    debug: bool = False,
    init: Callable[[nn.Module], Any] | str | PathLike[str] | None = None,
    plan: str | PathLike[str] | None = None,
) -> Step:
    """Compile a training step: `step(batch)` runs forward, backward, reduction and update on all ranks.

    Args:
        model: any module; it is not changed, but its parameters become views of flat buckets.
        optimizer: a `torch.optim` optimizer over the model's parameters; groups and LR schedulers work as always.
        loss: `(model, batch) -> scalar` or `-> (scalar, extras)`; None means `model(**batch).loss` or `model(*batch)`.
        mode: "replicate" (DDP), "zero1", "zero2", "zero3", or "auto": the plan that is fastest in simulation of those
            that fit in `memory`, mixtures of modes among them.
        memory: budget of a rank for parameters, optimizer state, gradients, buffers and activations: bytes, a string
            like "14GiB", a fraction of the device; None means 0.9 of it. In "zero3" what is left of a budget that is
            given is spent on parameters that stay gathered.
        accumulate: micro-batches a step; the batch is then a sequence of that many.
        clip_norm: the global gradient norm to clip to, exact across ranks.
        precision: dtypes of compute, reduction and master values.
        fuse: not built yet; "auto" and "off" are accepted, anything else is refused.
        offload: where optimizer state goes that is not kept in memory: "auto" (on a CPU a file in $WEFT_OFFLOAD_DIR or
            a temporary folder, on a GPU pinned host memory), a folder, or "off". What goes there:
            passes={"offload": {"fragments": "all"}}, or a list of buckets.
        passes: passes switched off or configured by name, for instance {"prefetch": False}.
        seed: of dropout and first values; None derives it from `torch.initial_seed()`. Rank r's dropout draws as after
            `manual_seed(seed + r)`.
        mesh: a one-dimensional `DeviceMesh`; None means all ranks.
        timeout: seconds after which a wait on another rank becomes an error.
        debug: number every collective, and make one that is out of sequence an error that names both sides.
        init: where first values come from: a safetensors file, a checkpoint's folder, or a function that initialises a
            module's own tensors in place, called for each that has some on the meta device, after its own method.
        cache_dir: folder that keeps measurements and plans; None means $WEFT_CACHE_DIR or ~/.cache/weft.
        plan: a file that `step.plan.save(path)` wrote for the same step: its decisions are taken.
    """
    options = check_options(
        mode=mode,
        memory=memory,
        accumulate=accumulate,
        clip_norm=clip_norm,
        precision=precision,
        fuse=fuse,
        offload=offload,
        passes=passes,
        seed=seed,
        cache_dir=cache_dir,
        mesh=mesh,
        timeout=timeout,
        debug=debug,
        init=init,
        plan=plan,
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; weft.compile takes a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; weft.compile takes a torch.optim.Optimizer")
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss is a {type(loss).__name__}; weft.compile takes a function (model, batch) -> scalar tensor, or None "
            "for the model's own loss"
        )
    return Step(model, optimizer, default_loss if loss is None else loss, options)


_alive: weakref.WeakSet[Step] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    """At exit nothing may be in flight when the process group goes away."""
    if peers_lost.is_set():
        return
    for step in list(_alive):
        with suppress(Exception):
            step.drain()
    leave()


class Step:
    """A compiled training step. Call it with a batch; it returns this rank's loss (and the loss function's extras)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, options: Options) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._options = loss, options
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._device = check_model(model)
        self._group_of = check_optimizer(model, optimizer)
        self._trained = [
            index in self._group_of and parameter.requires_grad for index, parameter in enumerate(self._parameters)
        ]
        if not any(self._trained):
            raise ValueError("the optimizer holds no parameter that requires grad: there is nothing to train")
        self._modules = list(model.modules())
        self._ambient = Ambient(model, loss)
        self._tree = ModelTree(model, optimizer)
        if self._device.type == "cpu":
            map_large_blocks()
        self._buffer_slots = buffer_slots(model)
        self._probe: Probe = probe(optimizer, self._device)
        # Of temporaries; what an optimizer of whole tensors takes is not known.
        self._update_elements = (
            update_elements(optimizer, self._probe.fused, self._device) if self._probe.elementwise else 0.0
        )
        self._first_values = FirstValues(model, options.init, self._device)
        self._collectives: Local = connect(self._device, options.mesh, options.timeout, debug=options.debug)
        self._infos = self._parameter_infos()
        self._mode: str = options.mode  # with "auto" until the plan is made
        self._why = self._check_mode()
        self._planned: Planned | None = None
        self._plan_before: str | None = None  # of a loaded checkpoint
        self._specs = [
            ParameterSpec(info.name, info.shape, info.stride, info.dtype, trained)
            for info, trained in zip(self._infos, self._trained, strict=True)
        ]
        self._seed = torch.initial_seed() if options.seed is None else options.seed
        self._random_state = _seeded_state(self._device, self._seed + self._collectives.rank)
        self._known = KnownTraces(self._ambient)
        self._layout: Layout | None = None
        self._executor: Executor | None = None
        self._guarded = False
        self._inside_gathered = False
        self._failed: str | None = None
        self.steps = 0  # updates so far; a checkpoint brings its own
        self._pending: Any = None  # a loaded checkpoint of which parts wait for the buckets (weft/saving)
        self._plan_of: list[Known] = []
        self._measured = Measured()
        self._heap_kept = False
        _alive.add(self)
        optimizer.register_state_dict_pre_hook(self._before_optimizer_state_dict)
        optimizer.register_state_dict_post_hook(self._after_optimizer_state_dict)
        optimizer.register_load_state_dict_post_hook(self._after_optimizer_load)

    # ---- what a user calls ----

    def __call__(self, batch: Any, *, micro_batches: int | None = None) -> Any:
        """Forward, backward, reduction and update; returns this rank's loss, averaged over micro-batches.

        `micro_batches`: how many this step has, where it is fewer than `accumulate` (the last step of an epoch), the
        same on all ranks. Gradients are averaged over those.
        """
        self._check_usable()
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step(batch) was called under torch.no_grad(); use step.evaluate(batch) to get a loss only"
            )
        parts = self._micro_batches(batch, micro_batches)
        self._check_unchanged()
        entries = [self._entry(part, training=True) for part in parts]
        executor = self._materialised()
        programs = [self._program(entry, self._variant(i, len(entries))) for i, (entry, _) in enumerate(entries)]
        alike = self._plan_of == [entry for entry, _ in entries]
        self._plan_of = [entry for entry, _ in entries]
        reached = [any(flags) for flags in zip(*(entry.trace.reached for entry, _ in entries), strict=True)]

        def run() -> list[tuple[Any, ...]]:
            executor.begin_step(reached, len(programs))
            runs = zip(programs, entries, strict=True)
            return [executor(program, self._inputs(entry, tensors)) for program, (entry, tensors) in runs]

        began = perf_counter()
        try:
            outputs = run()
            if executor.whole_update_due:
                self._update_whole(executor, run, outputs)
            executor.end_step()
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise
        if executor.without_loss:
            raise self._loss_error(executor.without_loss, outputs)
        self.steps += 1
        if not self._heap_kept and self._device.type == "cpu":
            self._heap_kept = True
            keep_heap()
        self._compare(perf_counter() - began, executor, alike)
        mark_stepped(self.optimizer)
        losses = [output[0] for output in outputs]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        extras = [self._extras(entry.trace, output) for (entry, _), output in zip(entries, outputs, strict=True)]
        if all(extra is None for extra in extras):
            return loss
        return loss, extras[0] if self._options.accumulate == 1 else extras

    def evaluate(self, batch: Any) -> Any:
        """The loss (and extras) of one batch in eval mode; nothing is updated. In zero3 all ranks must call it."""
        self._check_usable()
        self._check_unchanged()
        flags = [module.training for module in self._modules]
        self._ensure_layout(batch)
        self.model.eval()
        try:
            entry, tensors = self._entry(batch, training=False)
            executor = self._materialised()
            program = self._program(entry, "evaluate")
            kept = executor.random_state
            output = executor(program, self._inputs(entry, tensors))
            executor.random_state = kept  # an evaluation in between leaves the training's draws as they were
        finally:
            for module, flag in zip(self._modules, flags, strict=True):
                module.training = flag
        extras = self._extras(entry.trace, output)
        return output[0] if extras is None else (output[0], extras)

    def prepare(self, batch: Any) -> Plan:
        """Plan for a batch without running anything on it."""
        self._check_usable()
        entries = [self._entry(micro_batch, training=True)[0] for micro_batch in self._micro_batches(batch)]
        self._plan_of = entries
        for index, entry in enumerate(entries):
            self._program(entry, self._variant(index, len(entries)))
        return self.plan

    @property
    def plan(self) -> Plan:
        """The plan of the last signature seen: `.explain()`, `.code()`."""
        if self._layout is None or not self._plan_of:
            raise RuntimeError("there is no plan yet: call step(batch), or step.prepare(batch) to plan without running")
        assert self._planned is not None
        programs: dict[Variant, StepGraph] = {}
        arena = 0
        for index, entry in enumerate(self._plan_of):
            variant = self._variant(index, len(self._plan_of))
            program = self._program(entry, variant)
            programs.setdefault(variant, program.step)
            arena = max(arena, program.placement.nbytes)
        kept = self._layout.kept_bytes(self._probe.state_elements)
        costs, count, layout = self._planned.costs, len(self._plan_of), self._layout
        return Plan(
            layout=layout,
            programs=programs,
            decisions=self._planned.decisions,
            why=tuple(self._why),
            timeline=None if costs is None else lambda: timeline_of(programs, count, costs),
            memory=lambda: memory_of(
                programs,
                layout,
                count,
                state_elements=self._probe.state_elements,
                update_elements=self._update_elements,
                receives=self._collectives.receives,
                parameters=self._infos,
                buffer_bytes=sum(buffer.nbytes for buffer in self._buffers()),
                cpu=self._device.type == "cpu",
            ),
            state_bytes=kept,
            arena_bytes=arena,
            measured_seconds=self._measured.seconds,
        )

    @property
    def grad_norm(self) -> float | None:
        """The last step's global gradient norm before clipping; None without `clip_norm` (use inf to measure only)."""
        if self._executor is None or self._options.clip_norm is None or self._executor.grad_norm is None:
            return None
        return float(self._executor.grad_norm)

    def drain(self) -> None:
        """Wait until nothing is in flight: afterwards parameters hold their new values everywhere."""
        if self._executor is not None:
            self._executor.drain()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The whole model on every rank, to read and write; what was written goes back to the masters at the end.

        All ranks must enter, and write the same values.
        """
        self._check_usable()
        executor = self._materialised_if_needed()
        if executor is None:
            yield self.model
            return
        self.drain()
        if not self._guarded or self._inside_gathered:
            yield self.model
            return
        wholes: dict[int, torch.Tensor] = {}
        for state in executor.states:
            whole = self._gather_master(state)
            wholes[state.bucket.index] = whole
            for slot in state.bucket.slots:
                manage(self._parameters[slot.parameter], slot.name, slot.view(whole), None)
        self._inside_gathered = True
        try:
            yield self.model
        finally:
            self._inside_gathered = False
            for state in executor.states:
                whole = wholes.pop(state.bucket.index)
                state.write_back(whole)
                self._guard(state)

    def state_dict(self) -> dict[str, Any]:
        """The whole training state on every rank, on the CPU: model, optimizer, this rank's random state."""
        self._check_usable()
        if self._pending is not None:
            self._pending.settle(self)
        with self.gathered():
            model = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        executor = self._executor
        random_state = self._random_state if executor is None else executor.random_state
        return {
            "model": model,
            "optimizer": {
                "state": checkpoint.optimizer_state(self._optimizer_states(), self._names, self._collectives),
                "groups": [
                    {**group_options(group), "params": [self._name_of(p) for p in group["params"]]}
                    for group in self.optimizer.param_groups
                ],
            },
            "random": random_state.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict()` returned, in this or another mode or world size. All ranks must call it."""
        self._check_usable()
        checkpoint.check(state, self._names, self.optimizer)
        self._pending = None
        with self.gathered():
            self.model.load_state_dict(state["model"])
        for group, saved in zip(self.optimizer.param_groups, state["optimizer"]["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        by_index = {self._names.index(name): value for name, value in state["optimizer"]["state"].items()}
        self._import_optimizer(by_index)
        self._set_random_state(state["random"].clone())

    # ---- planning ----

    def _parameter_infos(self) -> list[ParameterInfo]:
        precision = self._options.precision
        infos = []
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            floating = parameter.is_floating_point()
            compute = (precision.compute if floating else None) or parameter.dtype
            infos.append(
                ParameterInfo(
                    index=index,
                    name=name,
                    shape=tuple(parameter.shape),
                    stride=dense_stride(parameter),
                    numel=parameter.numel(),
                    dtype=parameter.dtype,
                    group=self._group_of[index] if self._trained[index] else None,
                    compute=compute,
                    reduce=(precision.reduce if floating else None) or compute,
                    master=(precision.master if floating else None) or parameter.dtype,
                )
            )
        return infos

    def _check_mode(self) -> list[str]:
        """Refuse a mode that the optimizer does not allow; returns what is to be said about the optimizer."""
        if self._probe.elementwise:
            name = type(self.optimizer).__name__
            return [f"{name} runs fused: the same numbers in one pass over memory"] if self._probe.fused else []
        name = type(self.optimizer).__name__
        if self._options.mode not in ("auto", "replicate"):
            raise ValueError(
                f"mode={self._options.mode!r} with {name}: it needs whole tensors ({self._probe.why_not}), and this "
                "mode gives it slices. Use mode='replicate', or an elementwise optimizer such as AdamW or SGD"
            )
        if any(info.master != info.dtype for info in self._infos):
            raise ValueError(f"precision with a master dtype of its own needs an elementwise optimizer, not {name}")
        return [f"replicate: {name} needs whole tensors"]

    def _entry(self, batch: Any, training: bool) -> tuple[Known, list[torch.Tensor]]:
        """The trace for a batch, made where none is known that serves it, and the batch's tensors."""
        tensors, spec = split_batch(batch)
        structure = structure_of(tensors, spec, self._modules, self._buffers(), self._device, training)

        def captured(open_dims: OpenDims | None) -> Trace:
            try:
                return self._capture(tensors, spec, training, open_dims)
            except Exception:
                check_batch_device(tensors, spec, self._device)  # the reason, perhaps; a loss may move tensors itself
                raise

        known = self._known.find(tensors, structure, captured)
        if self._layout is None and training:
            self._layout = self._make_layout(known.trace)
        return known, tensors

    def _capture(
        self, tensors: Sequence[torch.Tensor], spec: BatchSpec, training: bool, open_dims: OpenDims | None
    ) -> Trace:
        with unguarded(self._parameters), torch.inference_mode(False):
            return capture(
                self.model,
                self._loss,
                tensors,
                spec,
                self._specs,
                device=self._device,
                backward=training,
                compute_dtype=self._options.precision.compute,
                open_dims=open_dims,
            )

    def _ensure_layout(self, batch: Any) -> None:
        """An evaluation may come first; the layout is made from a training step all the same."""
        if self._layout is None:
            self._entry(batch, training=True)

    def _make_layout(self, trace: Trace) -> Layout:
        """Plan from the first trace; a collective call."""
        with Progress("weft", shown=self._collectives.rank == 0) as progress:
            self._planned = self._planner(progress).plan(trace)
        self._mode = self._planned.layout.mode
        return self._planned.layout

    def _planner(self, progress: Callable[[str], None]) -> Planner:
        folder = default_folder() if self._options.cache_dir is None else self._options.cache_dir
        return Planner(
            parameters=self._infos,
            options=self._options,
            collectives=self._collectives,
            device=self._device,
            optimizer=self.optimizer,
            state_elements=self._probe.state_elements,
            update_elements=self._update_elements,
            fused=self._probe.fused,
            whole_update=not self._probe.elementwise,
            buffer_bytes=sum(buffer.nbytes for buffer in self._buffers()),
            budget=budget_bytes(self._options.memory, self._device),
            before=self._plan_before,
            on_meta=[name for name, p in zip(self._names, self._parameters, strict=True) if p.is_meta],
            folder=folder,
            progress=progress,
        )

    def _variant(self, index: int, count: int) -> Variant:
        if count == 1:
            return "only"
        return "first" if index == 0 else "last" if index == count - 1 else "middle"

    def _program(self, entry: Known, variant: Variant) -> Program:
        if variant not in entry.programs:
            assert self._layout is not None
            assert self._planned is not None
            policy = self._planned.policy(variant)
            context = PlanContext(
                None if policy is None else self._planned.costs,
                self._collectives.receives,
                policy=policy,
                rule=self._options.prefetch_rule,
            )
            step = build_program(
                entry.trace,
                self._layout,
                self._options,
                variant,
                whole_update=not self._probe.elementwise,
                context=context,
            )
            entry.programs[variant] = Program(step, receives=self._collectives.receives)
        return entry.programs[variant]

    # ---- the plan against what happens ----

    def _compare(self, seconds: float, executor: Executor, alike: bool) -> None:
        """After the first steps, on all ranks at the same one: was the prediction right? If not, plan once more."""
        planned = self._planned
        if planned is None or planned.costs is None or not (self._options.enabled("replan") and measuring()):
            return
        if not self._measured.add(seconds, executor.waited):
            return
        assert self._measured.seconds is not None
        mine = (self._measured.seconds, self._measured.waited) if alike else None
        known = [answer for answer in self._collectives.gather_objects(mine) if answer is not None]
        if not known:
            return  # shapes vary: no step is like the one that was predicted
        step, waited = (statistics.median(answer[part] for answer in known) for part in (0, 1))
        programs = self.plan.programs

        def predict(costs: Costs) -> Timeline:
            return timeline_of(programs, len(self._plan_of), costs)

        predicted = predict(planned.costs)
        costs = scaled_compute(planned.costs, predicted, step, waited)
        # Ranks with batches of other shapes predict otherwise: rank 0's costs, and its verdict, are everyone's.
        scale, before = self._collectives.gather_objects((costs.scale, predicted.seconds))[0]
        off = abs(step / before - 1)
        if off <= NEAR:
            return
        costs = replace(planned.costs, scale=scale)
        if off > WRONG:
            factor = self._collectives.gather_objects(links_factor(costs, predict, step))[0]
            costs = costs.with_links(costs.links.scaled(factor))
        self.drain()
        with Progress("weft", shown=self._collectives.rank == 0) as progress:
            self._planned = self._planner(progress).again(self._plan_of[0].trace, planned, costs)
        self._measured = Measured(compared=True)
        self._layout = executor.layout = self._planned.layout
        self._known.forget_programs()
        if off > WRONG and self._collectives.rank == 0:
            warnings.warn(
                f"a step takes {1e3 * step:.1f} ms, and {1e3 * before:.1f} ms were predicted: the machine or the "
                "network is not as it was measured. Planned once more from what was seen: "
                f"{1e3 * self.plan.predicted.seconds:.1f} ms. `weft measure` measures anew",
                stacklevel=3,
            )

    # ---- state ----

    def _materialised(self) -> Executor:
        """Move parameters into buckets, at the first call that runs something: rank 0's values, on every rank."""
        if self._executor is not None:
            return self._executor
        assert self._layout is not None
        layout, collectives = self._layout, self._collectives
        collectives.check_runs()
        self._first_values.begin(layout, self._seed, collectives)
        values: list[torch.Tensor] = [parameter.detach() for parameter in self._parameters]
        initial = self._take_optimizer_state()
        states: list[BucketState] = []
        elementwise = self.optimizer if self._probe.elementwise else None
        fragments = make_fragments(layout, self._options, self._device, self._probe.state_elements)
        self._guarded = any(
            bucket.sharded or bucket.compute != bucket.master or bucket.master != self._infos[slot.parameter].dtype
            for bucket in layout.buckets
            for slot in bucket.slots
        )
        for bucket in layout.buckets:
            flat = self._first_values.of_bucket(bucket, values, collectives)
            state = BucketState(bucket, collectives.rank, flat, elementwise, fused=self._probe.fused)
            del flat
            for slot in bucket.slots:
                values[slot.parameter] = torch.empty(0)
            states.append(state)
            self._guard(state)
            if state.optimizer is not None and initial:
                state.optimizer.import_state(initial)
            if fragments is not None and bucket.index in layout.offloaded:
                fragments.add(state)
        for index, value in enumerate(values):
            if index in layout.slot_of:
                continue
            if value.is_meta:
                whole = self._first_values.whole(self._names[index], value)
                manage(self._parameters[index], self._names[index], whole, None)
            else:
                first = value.contiguous()
                collectives.broadcast(first, self._names[index])
                value.copy_(first)
        for name, buffer in zip(self._buffer_names(), self._buffers(), strict=True):
            collectives.broadcast(buffer, f"the first values of the buffer {name}")
        self._first_values.pending = False
        self._executor = Executor(
            layout,
            states,
            collectives,
            device=self._device,
            groups=lambda index: self.optimizer.param_groups[index],
            accumulate=self._options.accumulate,
            clip_norm=self._options.clip_norm,
            parameter_count=len(self._parameters),
            buffers=self._buffers,
            random_state=self._random_state,
            fragments=fragments,
        )
        self._tree.remember_memory()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.apply(self)
        del values
        return_freed_memory()
        return self._executor

    def _materialised_if_needed(self) -> Executor | None:
        """The executor if there is one; a model on the meta device needs it to have values at all."""
        if self._executor is None and self._first_values.pending:
            if self._layout is None:
                raise RuntimeError(
                    "the model is on the meta device and has no values yet: what a rank holds is decided with the "
                    "first batch. Call step.prepare(batch) before this"
                )
            return self._materialised()
        return self._executor

    def _guard(self, state: BucketState) -> None:
        """Point a bucket's parameters at what this rank holds of them."""
        bucket = state.bucket
        for position, slot in enumerate(bucket.slots):
            parameter = self._parameters[slot.parameter]
            if self._guarded:
                dtype = self._infos[slot.parameter].dtype
                data = placeholder(slot.shape, dtype, self._device)
                manage(parameter, slot.name, data, self._refuse_sharded)
            else:
                in_flight = bucket.scatter and self._collectives.world > 1
                guard = (lambda _name: self.drain()) if in_flight else None
                manage(parameter, slot.name, state.views[position], guard)

    def _refuse_sharded(self, name: str) -> None:
        raise ShardedError(
            f"{name} is used outside step.gathered(), and this rank does not hold its values there (mode "
            f"{self._mode!r}). Write `with step.gathered() as model:` around the use, on all ranks; for a loss use "
            "step.evaluate(batch), for a checkpoint step.state_dict()"
        )

    def _gather_master(self, state: BucketState) -> torch.Tensor:
        bucket = state.bucket
        if not bucket.scatter:
            return state.master.clone()
        whole = torch.empty(bucket.numel, dtype=bucket.master, device=self._device)
        pending = self._collectives.gather(whole, state.master.contiguous())
        self._collectives.wait(pending, f"the masters of {bucket.describe()}")
        return whole

    # ---- the optimizer's state ----

    def _take_optimizer_state(self) -> dict[int, dict[str, Any]]:
        """What the user's optimizer holds already, by parameter index; freed there, unless it runs whole."""
        if not self._probe.elementwise:
            return {}
        index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        taken = {index[id(p)]: dict(state) for p, state in self.optimizer.state.items() if state and id(p) in index}
        self.optimizer.state.clear()
        return taken

    def _optimizer_states(self) -> list[BucketState] | dict[int, dict[str, Any]]:
        """Where optimizer state is: in the buckets, or with the user's optimizer."""
        if self._executor is not None and self._probe.elementwise:
            return list(self._executor.states)
        index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        return {index[id(p)]: dict(state) for p, state in self.optimizer.state.items()}

    def _import_optimizer(self, by_index: Mapping[int, Mapping[str, Any]]) -> None:
        if self._executor is not None and self._probe.elementwise:
            for state in self._executor.states:
                if state.optimizer is not None:
                    state.optimizer.import_state(by_index)
                    state.put_out()
            return
        self.optimizer.state.clear()
        for index, value in by_index.items():
            moved = {
                key: item.to(self._device) if isinstance(item, torch.Tensor) and item.dim() else item
                for key, item in value.items()
            }
            self.optimizer.state[self._parameters[index]] = checkpoint.owned_copy(moved, None)

    def _before_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.state_dict()` works where this rank has all state, and says what does where it has not."""
        if self._pending is not None:
            self._pending.settle(self)
        if self._executor is None or not self._probe.elementwise:
            return
        if self._layout is not None and self._layout.world > 1 and any(b.scatter for b in self._layout.buckets):
            raise ShardedError(
                f"optimizer.state_dict() in mode {self._mode!r}: this rank holds a slice of the state. Use "
                "step.state_dict() on all ranks, and step.load_state_dict() to restore"
            )
        optimizer.state.clear()
        found = checkpoint.optimizer_state(list(self._executor.states), self._names, self._collectives, copy=False)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name in found:
                optimizer.state[parameter] = found[name]

    def _after_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        """State that is offloaded was brought in for the state dict, and is to go with it."""
        if self._executor is not None and self._executor.fragments is not None:
            optimizer.state.clear()

    def _after_optimizer_load(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pending is not None:
            self._pending.optimizer_state = {}
        if self._executor is not None and self._probe.elementwise:
            self._import_optimizer(self._take_optimizer_state())

    def _update_whole(self, executor: Executor, run: Any, outputs: list[tuple[Any, ...]]) -> None:
        """The user's own optimizer on whole parameters, with a closure that runs the step again if it asks for one."""

        def mean_loss(results: Sequence[tuple[Any, ...]]) -> torch.Tensor:
            loss = torch.stack([result[0].detach().double() for result in results]).mean()
            rows, pending = self._collectives.start_rows(loss[None])
            self._collectives.wait(pending, "the mean of the losses")
            return rows.mean().to(results[0][0].dtype)

        def set_gradients() -> None:
            found = executor.whole_gradients()
            for index, parameter in enumerate(self._parameters):
                if self._trained[index]:
                    parameter.grad = found[index].to(parameter.dtype) if index in found else None

        answered = [outputs]

        def closure() -> torch.Tensor:
            results = answered.pop() if answered else run()
            executor.without_loss = ()  # a line search may step where there is no loss, and comes back
            set_gradients()
            return mean_loss(results)

        step = type(self.optimizer).step
        with plain_tensor_access():
            if needs_closure(step):
                step(self.optimizer, closure)  # type: ignore[arg-type]  # torch itself returns tensors
            else:
                set_gradients()
                step(self.optimizer)
            for parameter in self._parameters:
                parameter.grad = None
        executor.whole_update_due = False
        for state in executor.states:
            state.refresh()

    # ---- small things ----

    def _loss_error(self, ranks: Sequence[int], outputs: Sequence[tuple[Any, ...]]) -> LossError:
        mine = ", ".join(f"{float(output[0]):g}" for output in outputs)
        names = ", ".join(str(self._collectives.ranks[rank]) for rank in ranks)
        where = f" on rank{'s' if len(ranks) > 1 else ''} {names}"
        return LossError(
            f"the loss of step {self.steps + 1} is not a number{where if self._collectives.world > 1 else ''} (here: "
            f"{mine}). Nothing was updated on any rank: parameters, buffers, optimizer and random state are as after "
            f"step {self.steps}. Look at this batch, lower the learning rate or clip gradients (clip_norm=1.0); to "
            "skip such batches, catch weft.LossError on all ranks"
        )

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step failed half-way ({self._failed}), so parameters may differ between ranks: restart "
                "from the last checkpoint"
            )
        if self._inside_gathered:
            raise RuntimeError("this call is not possible inside step.gathered(): leave the context first")

    def _check_unchanged(self) -> None:
        """Refuse, before anything runs, a model or optimizer that is not what was compiled."""
        self._tree.check()
        if not self._guarded:
            self._tree.check_memory()

    def _micro_batches(self, batch: Any, count: int | None = None) -> Sequence[Any]:
        most = self._options.accumulate
        count = most if count is None else count
        if not 1 <= count <= most:
            raise ValueError(f"micro_batches={count}: a step has 1 to {most} of them (accumulate={most})")
        if most == 1:
            return [batch]
        if not isinstance(batch, (list, tuple)) or len(batch) != count:
            seen = f"{len(batch)} of them" if isinstance(batch, (list, tuple)) else f"a {type(batch).__name__}"
            said = f"accumulate={most}" if count == most else f"micro_batches={count}"
            raise ValueError(
                f"{said}: the batch is a list of {count} micro-batches, and this is {seen}. A step with fewer than "
                f"accumulate={most} says so, on all ranks: step(batch, micro_batches=...)"
            )
        return batch

    def _inputs(self, entry: Known, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._layout is not None
        loose = []
        for index, parameter in enumerate(self._parameters):
            if index not in self._layout.slot_of:
                loose.append(parameter.detach().to(self._infos[index].compute))
        return [*loose, *(tensor.detach() for tensor in (*self._buffers(), *tensors))]

    def _buffer_names(self) -> list[str]:
        return [name for name, _, _ in self._buffer_slots]

    def _buffers(self) -> list[torch.Tensor]:
        found = []
        for name, module, attribute in self._buffer_slots:
            buffer = module._buffers.get(attribute)
            if buffer is None:
                raise RuntimeError(f"the buffer {name} was removed after weft.compile; call weft.compile again")
            found.append(buffer)
        return found

    def _extras(self, trace: Trace, output: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(list(output[1:]), trace.extras_spec)

    def _name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, p in zip(self._names, self._parameters, strict=True) if p is parameter)

    def _set_random_state(self, state: torch.Tensor) -> None:
        self._random_state = state
        if self._executor is not None:
            self._executor.random_state = state


def _seeded_state(device: torch.device, seed: int) -> torch.Tensor:
    """The state in which `torch.manual_seed(seed)` would leave the device's generator."""
    generator = device_generator(device)
    saved = generator.get_state()
    try:
        return generator.manual_seed(seed).get_state()
    finally:
        generator.set_state(saved)
