"""Run the user's model and loss once on fake tensors and return what they did as a functional graph.

The user's own Python runs: forward, loss and `autograd.grad`. Nothing is computed on real data, nothing communicates.
It runs twice, under different random states, and the two graphs are compared: a value that Python computed from
something else than the batch (a counter, numpy, the clock) shows as a difference and is refused.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call

from weft._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    enable_python_dispatcher,
    fake_mode,
    make_fx,
    pytree,
    storage_key,
)
from weft.errors import TraceError, UnlocatedTraceError
from weft.trace import functional
from weft.trace.guards import (
    REENTRANT_ADVICE,
    ParameterGuard,
    check_no_reentrant_checkpoint,
    describe,
    fixed_state,
    reseeding_located,
    restored,
)
from weft.trace.randomness import RandomKeys
from weft.trace.signature import BatchSpec
from weft.trace.sizes import Guards, OpenDims, OpenSizes, geometry

Loss = Callable[[nn.Module, Any], Any]


@dataclass
class Trace:
    """One micro-batch's forward and backward (or forward alone) as a functional ATen graph.

    Placeholders are the parameters, the buffers and the batch's tensors, in this order. The graph's output node holds,
    as one flat list, the loss, the tensors of the extras, one gradient a parameter (None where the loss does not reach
    it or it is frozen) and one value a buffer (None where forward does not change it). Nodes of backward have
    meta["backward"]. With `guards` some sizes of the batch are open, and the graph is right for batches that pass them.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    parameters: list[fx.Node]
    buffers: list[fx.Node]
    inputs: list[fx.Node]
    loss: fx.Node
    extras: list[Any]
    extras_spec: Any
    gradients: list[fx.Node | None]
    written: list[fx.Node | None]
    guards: Guards | None = None

    @property
    def reached(self) -> tuple[bool, ...]:
        """Which parameters get a gradient."""
        return tuple(gradient is not None for gradient in self.gradients)

    def same_as(self, other: Trace) -> bool:
        """Whether both compute the same, node by node."""
        difference = functional.first_difference(self.graph, other.graph, self.constants, other.constants)
        return difference is None and self.extras_spec == other.extras_spec

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a graph with open sizes is right for a batch."""
        return self.guards is not None and self.guards.accept(geometry(tensors))


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss when the user gives none: `model(**batch).loss`, or the model's own scalar."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


class _Step(nn.Module):
    """The model with its loss and backward as one forward, so that one `functional_call` covers all of it.

    Backward has to run inside: checkpointing calls the modules again, and must find the traced parameters in them.
    """

    def __init__(self, model: nn.Module, loss: Loss, spec: BatchSpec, backward: bool) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.spec = spec
        self.backward = backward
        self.extras_spec: Any = None

    def forward(
        self,
        parameters: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[Any], list[torch.Tensor | None], list[torch.Tensor | None]]:
        loss, extras = _split_loss(self.loss(self.model, self.spec.join(inputs)))
        # A buffer may be rebound as well as changed in place, so read them back by name.
        now = dict(self.model.named_buffers())
        written = [now.get(name) for name in buffers]
        for name, value in zip(buffers, written, strict=True):
            if value is None:
                raise TraceError(f"forward deletes the buffer {name}: keep it, or make it a plain value")
        result = loss.detach()  # the last node of forward
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        if self.backward:
            check_no_reentrant_checkpoint(loss)
            trained = [index for index, value in enumerate(parameters.values()) if value.requires_grad]
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on any parameter that requires grad, so there is nothing to train"
                )
            found = torch.autograd.grad(
                loss, [list(parameters.values())[index] for index in trained], allow_unused=True
            )
            for index, gradient in zip(trained, found, strict=True):
                gradients[index] = gradient
        extras = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, extras)
        leaves, self.extras_spec = pytree.tree_flatten(extras)
        return result, leaves, gradients, written


def _split_loss(value: Any) -> tuple[torch.Tensor, Any]:
    loss, extras = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        seen = describe(loss) if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
        raise TypeError(
            f"the loss function returned {seen}; it must return a scalar floating-point tensor, or a pair of that and "
            "extras (any nesting of tensors). Without a loss function the model must return an output with a .loss"
        )
    return loss, extras


@contextmanager
def _python_randomness(seed: int):  # type: ignore[no-untyped-def]
    """Python's and numpy's random states set for one trace and put back."""
    saved = random.getstate()
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    if numpy:
        numpy.random.seed((seed ^ seed >> 32) % 2**32)
    try:
        yield
    finally:
        random.setstate(saved)
        if numpy:
            numpy.random.set_state(numpy_state)


@dataclass(frozen=True)
class ParameterSpec:
    """What a trace needs to know of a parameter; its values may be sharded or not exist yet."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass
class _Run:
    """One run of the step under `make_fx`."""

    traced: fx.GraphModule
    mode: FakeTensorMode
    arguments: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]
    keys: list[int]
    sizes: OpenSizes | None


def capture(
    model: nn.Module,
    loss: Loss,
    tensors: Sequence[torch.Tensor],
    spec: BatchSpec,
    parameters: Sequence[ParameterSpec],
    *,
    device: torch.device,
    backward: bool = True,
    compute_dtype: torch.dtype | None = None,
    open_dims: OpenDims | None = None,
) -> Trace:
    """Trace one training step (or, with `backward=False`, one evaluation) of a model.

    With `open_dims` those sizes of the batch are left open.
    """
    buffers = dict(model.named_buffers())
    step = _Step(model, loss, spec, backward)

    def fake_parameter(parameter: ParameterSpec) -> torch.Tensor:
        dtype = compute_dtype if compute_dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
        return torch.empty_strided(parameter.shape, parameter.stride, dtype=dtype, device=device)

    def fake_buffer(mode: FakeTensorMode, buffer: torch.Tensor) -> torch.Tensor:
        if not buffer.is_meta:
            return mode.from_tensor(buffer.detach())
        with mode:
            return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)

    def run(base_key: int, locate: bool = False) -> _Run:
        keys = RandomKeys(device, first=base_key)
        # A mode of its own for every run: a tensor that an earlier one left on a module is then recognised.
        mode = fake_mode(symbolic=open_dims is not None)
        sizes = None if open_dims is None else OpenSizes(mode, tensors, open_dims)
        with mode:
            values = [fake_parameter(parameter) for parameter in parameters]
        arguments = (
            values,
            [fake_buffer(mode, buffer) for buffer in buffers.values()],
            [mode.from_tensor(tensor.detach()) for tensor in tensors] if sizes is None else sizes.tensors,
        )

        def traced(values: list[Any], states: list[Any], inputs: list[Any]) -> Any:
            named = {
                parameter.name: value.detach().requires_grad_(parameter.trained and backward)
                for parameter, value in zip(parameters, values, strict=True)
            }
            named_states = {name: state.detach() for name, state in zip(buffers, states, strict=True)}
            prefixed = {f"model.{name}": value for name, value in (named | named_states).items()}
            guard = ParameterGuard(named, list(model.parameters()))
            with torch.set_grad_enabled(backward), guard, keys:
                result = functional_call(step, prefixed, (named, named_states, inputs))
                keys.check_not_reseeded()
            return result

        with ExitStack() as stack:
            if locate:
                stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
                stack.enter_context(reseeding_located())
            for context in (_python_randomness(base_key), keys.installed(), mode, fixed_state(model)):
                stack.enter_context(context)
            if sizes is not None:
                stack.enter_context(enable_python_dispatcher())
            graph = make_fx(traced, record_stack_traces=locate)(*arguments)
        return _Run(graph, mode, arguments, keys.keys, sizes)

    def run_and_find_lines() -> fx.GraphModule:
        """Run once more, noting where things come from, so that a message can name the line."""
        with restored(model), cast_inputs(model, compute_dtype), _refusals():
            return run(_BASE_KEY, locate=True).traced

    try:
        with restored(model), cast_inputs(model, compute_dtype), _refusals():
            first = run(_BASE_KEY)
            # What forward left on the modules stays for the second run: a counter then shows as a changed constant.
            second = run(2 * _BASE_KEY).traced
            difference = functional.first_difference(
                first.traced.graph,
                second.graph,
                functional.constants_of(first.traced),
                functional.constants_of(second),
            )
    except UnlocatedTraceError as error:
        run_and_find_lines()
        raise TraceError(str(error)) from error.__cause__
    if difference is not None:
        raise _varying(difference, run_and_find_lines())
    functional.set_random_keys(first.traced.graph, first.keys)
    if functional.mutating_nodes(first.traced.graph):
        with first.mode, nullcontext() if first.sizes is None else enable_python_dispatcher():
            first.traced = functional.functionalize(first.traced, first.arguments, first.keys)
    trace = _collect(first.traced, step, parameters, list(buffers), len(tensors))
    _check_writes_to_batch(trace, tensors)
    if first.sizes is not None:
        trace.guards = first.sizes.guards()
    return trace


# Large, so that a user's own seed is never taken for one of ours.
_BASE_KEY = 0x5EED_0000_0000


@contextmanager
def cast_inputs(model: nn.Module, dtype: torch.dtype | None):  # type: ignore[no-untyped-def]
    """With a compute dtype of its own, the model's floating-point inputs are cast to it, as FSDP does."""
    if dtype is None:
        yield
        return

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# ---- refusals ----

_DATA_DEPENDENT = (
    "the step needs a tensor's value while it is being captured ({what}): a Python branch, a loop bound, .item() or a "
    "shape that depends on data. Use torch.where or masks instead of branches, return values to log as extras instead "
    "of calling .item(), and keep shapes independent of values"
)
_STALE = (
    "forward reads a tensor that an earlier forward left in a module attribute ({what}). Make it a buffer "
    "(register_buffer), so that weft carries it from step to step"
)
_MESSAGES = (
    ("get value out of a tracing tensor", _DATA_DEPENDENT),
    ("data-dependent", _DATA_DEPENDENT),
    ("Checkpointing is not compatible with .grad()", REENTRANT_ADVICE.replace("{", "{{").replace("}", "}}")),
    ("mixing fake modes", _STALE),
)


def user_frame(error: BaseException) -> str:
    """The innermost frame of an error that is neither PyTorch's nor ours, as file:line (code)."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*functional.OURS, "<"))]
    if not theirs:
        return "a line that is not known"
    frame = theirs[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


@contextmanager
def _refusals():  # type: ignore[no-untyped-def]
    """Turn what cannot be captured into a TraceError that names the user's line."""
    try:
        yield
    except UnlocatedTraceError:
        raise
    except TraceError as error:
        if "\n  at " in str(error):
            raise
        raise TraceError(f"{error}\n  at {user_frame(error)}") from error.__cause__
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = str(getattr(error, "func", "") or error).split("\n")[0]
        raise TraceError(f"{_DATA_DEPENDENT.format(what=what)}\n  at {user_frame(error)}") from error
    except Exception as error:
        text = str(error)
        for pattern, message in _MESSAGES:
            if pattern.lower() in text.lower():
                what = text.strip().split("\n")[0][:200]
                raise TraceError(f"{message.format(what=what)}\n  at {user_frame(error)}") from error
        error.add_note(f"raised while weft captured the step, at {user_frame(error)}")
        raise


def _varying(difference: functional.Difference, located: fx.GraphModule) -> TraceError:
    nodes = list(located.graph.nodes)
    node = nodes[difference.index] if difference.index < len(nodes) else nodes[-1]
    where = functional.user_line(node)
    return TraceError(
        f"a value that is not part of the batch changes from step to step and would be frozen into the graph: "
        f"{difference.text}. Python counters, random, numpy and the clock do this, and plain tensor attributes that "
        f"forward rebinds. Pass the value in the batch, draw it with torch, or keep it in a buffer.\n  at {where}"
    )


def _check_writes_to_batch(trace: Trace, tensors: Sequence[torch.Tensor]) -> None:
    """A write to one of two batch tensors that share memory would not be seen through the other."""
    storages = [storage_key(tensor) for tensor in tensors]
    written = {node.args[0] for node in functional.mutating_nodes(trace.graph)}
    for index, placeholder in enumerate(trace.inputs):
        if placeholder in written and storages.count(storages[index]) > 1:
            raise TraceError(
                f"the step changes a tensor of the batch in place ({describe(tensors[index])}), and another tensor of "
                "the batch lies in the same memory: clone one of them before the call"
            )


def _collect(
    traced: fx.GraphModule,
    step: _Step,
    parameters: Sequence[ParameterSpec],
    buffer_names: Sequence[str],
    inputs: int,
) -> Trace:
    """Name things, drop what computes nothing, and sort the outputs by what they are."""
    names = [parameter.name for parameter in parameters]
    labels = [*names, *buffer_names, *(f"batch_{index}" for index in range(inputs))]
    graph, constants = functional.simplify(traced, labels, inputs)
    output = graph.output_node()
    flat = list(output.args[0])  # type: ignore[arg-type]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    count, states = len(names), len(buffer_names)
    extras_count = len(flat) - 1 - count - states
    extras = flat[1 : 1 + extras_count]
    gradients = flat[1 + extras_count : 1 + extras_count + count]
    values = flat[1 + extras_count + count :]
    buffers = placeholders[count : count + states]
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.meta["val"].layout is not torch.strided:
            raise TraceError(
                f"the gradient of {name} is {gradient.meta['val'].layout}; weft reduces dense gradients only. "
                "Construct the embedding with sparse=False"
            )
    return Trace(
        graph=graph,
        constants=constants,
        parameters=placeholders[:count],
        buffers=buffers,
        inputs=placeholders[count + states :],
        loss=flat[0],
        extras=extras,
        extras_spec=step.extras_spec,
        gradients=gradients,
        written=[None if new is old else new for new, old in zip(values, buffers, strict=True)],
    )
