"""The user's optimizer, run on flat segments of what this rank owns.

An elementwise optimizer does to a flat segment what it does to a parameter, so one call updates many parameters. A
segment is a run of parameters with one history: when a step reaches only some of them, it is split, and the others keep
their step counters, as in eager. Whether an optimizer is elementwise is not looked up but tried.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft._torch import drop_step_hooks
from weft.state.layout import Bucket, Slot


@dataclass(frozen=True)
class Probe:
    """What a trial on a few numbers showed about an optimizer."""

    elementwise: bool
    why_not: str
    state_elements: float  # elements of state per parameter element
    fused: bool  # the user left the implementation open, and the fused one gives the same numbers


def shadow(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings, with parameters and state of its own."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # LR schedulers wrap the user's instance
    twin.state = defaultdict(dict)
    drop_step_hooks(twin)
    twin.param_groups = []
    return twin


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters, as they are now."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def run_step(twin: torch.optim.Optimizer, options: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
    twin.param_groups = [{**options, "params": list(tensors)}]
    type(twin).step(twin)


def needs_closure(step: Callable[..., Any]) -> bool:
    """Whether an optimizer's `step` cannot be called without a closure that computes the loss (LBFGS)."""
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def probe(optimizer: torch.optim.Optimizer, device: torch.device) -> Probe:
    """Try the optimizer on a small matrix whole and cut in two flat pieces: elementwise means the same numbers.

    Where the user left `fused` and `foreach` open, the fused implementation is tried too: it reads memory once.
    """
    options = group_options(optimizer.param_groups[0])
    try:
        whole, elements = _trial(optimizer, options, (8, 32), device)
        pieces, _ = _trial(optimizer, options, (2, 128), device)
    except Exception as error:
        return Probe(False, f"{type(error).__name__}: {error}", 2.0, False)
    if not torch.allclose(pieces, whole, rtol=1e-9, atol=1e-12):
        return Probe(False, "a matrix and its halves are updated differently", elements, False)
    fused = False
    if _open_to_fusing(options):
        try:
            result, _ = _trial(optimizer, {**options, "fused": True}, (2, 128), device)
            fused = torch.allclose(result, whole, rtol=1e-9, atol=1e-12)
        except Exception:
            fused = False  # not every optimizer has one, nor one for every device
    return Probe(True, "", float(int(elements)), fused)


def _open_to_fusing(options: Mapping[str, Any]) -> bool:
    left_open = "fused" in options and options["fused"] is None and options.get("foreach") is None
    return left_open and not options.get("capturable") and not options.get("differentiable")


def _trial(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, float]:
    """Three steps on 256 numbers: one 8 x 32 matrix, or two flat pieces of 128. Returns them, and state per element."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(256, generator=generator, dtype=torch.float64).to(device) for _ in range(4)]

    def cut(values: torch.Tensor) -> list[torch.Tensor]:
        pieces = [values] if shape == (8, 32) else list(values.split(shape[1]))
        return [piece.clone().view(8, 32) if shape == (8, 32) else piece.clone() for piece in pieces]

    tensors = cut(draws[0])
    twin = shadow(optimizer)
    # Adagrad fills its state when it is constructed; shadows start from zeros instead.
    initial: Mapping[str, Any] = next((state for state in optimizer.state.values() if "sum" in state), {})
    for tensor in tensors if initial else ():
        twin.state[tensor] = {
            key: torch.zeros_like(tensor) if value.dim() else torch.zeros_like(value) for key, value in initial.items()
        }
    for gradients in draws[1:]:
        for tensor, gradient in zip(tensors, cut(gradients), strict=True):
            tensor.grad = gradient
        run_step(twin, options, tensors)
    kept = sum(v.numel() for s in twin.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    return torch.cat([tensor.flatten() for tensor in tensors]), kept / 256


@dataclass
class Segment:
    """A run of elements with one history; `tensor` is a view of the master values, `state` the optimizer's."""

    start: int  # in elements of the owned range
    stop: int
    parameters: frozenset[int]
    tensor: torch.Tensor


class BucketOptimizer:
    """The optimizer's update of what this rank owns of one bucket."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, bucket: Bucket, owned: slice, master: torch.Tensor, *, fused: bool
    ) -> None:
        assert bucket.group is not None
        # Fused updates round differently; who computes in double wants the bits that eager gives.
        self.fused = fused and master.dtype is not torch.float64
        self.bucket = bucket
        self.owned = owned
        self.master = master
        self.twin = shadow(optimizer)
        self.segments: list[Segment] = []
        self._pieces = self._parameter_pieces()
        self._build({})

    def _parameter_pieces(self) -> list[tuple[int, int, int]]:
        """(parameter, start, stop) of every parameter with elements in the owned range, relative to its start."""
        pieces = []
        for slot in self.bucket.slots:
            start, stop = max(slot.offset, self.owned.start), min(slot.end, self.owned.stop)
            if start < stop:
                pieces.append((slot.parameter, start - self.owned.start, stop - self.owned.start))
        return pieces

    def _build(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Make segments of neighbours whose scalar state agrees, and cut their state from the parameters'.

        `states` holds, per parameter, its piece of the state: flat tensors over the owned part, or scalars.
        """
        self.segments, self.twin.state = [], defaultdict(dict)
        run: list[tuple[int, int, int]] = []
        for piece in self._pieces:
            if run and not _same_history(states.get(run[-1][0], {}), states.get(piece[0], {})):
                self._add_segment(run, states)
                run = []
            run.append(piece)
        if run:
            self._add_segment(run, states)

    def _add_segment(self, run: Sequence[tuple[int, int, int]], states: Mapping[int, Mapping[str, Any]]) -> None:
        start, stop = run[0][1], run[-1][2]
        segment = Segment(start, stop, frozenset(piece[0] for piece in run), self.master[start:stop])
        first = states.get(run[0][0], {})
        state: dict[str, Any] = {}
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                flat = torch.zeros(stop - start, dtype=value.dtype, device=self.master.device)
                for parameter, piece_start, piece_stop in run:
                    flat[piece_start - start : piece_stop - start].copy_(states[parameter][key])
                state[key] = flat
            else:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if state:
            self.twin.state[segment.tensor] = state
        self.segments.append(segment)

    def step(self, gradient: torch.Tensor, reached: frozenset[int], options: Mapping[str, Any]) -> None:
        """Update the owned range from its gradient; parameters outside `reached` stay untouched."""
        if any(
            not (segment.parameters <= reached or segment.parameters.isdisjoint(reached)) for segment in self.segments
        ):
            self._split(reached)
        active = [segment for segment in self.segments if segment.parameters <= reached]
        for segment in active:
            segment.tensor.grad = gradient[segment.start : segment.stop]
        if active:
            if self.fused and _open_to_fusing(options):
                options = {**options, "fused": True}
            run_step(self.twin, options, [segment.tensor for segment in active])
        for segment in active:
            segment.tensor.grad = None

    def _split(self, reached: frozenset[int]) -> None:
        """Cut segments so that each is reached as a whole or not at all."""
        states = self.export_state()
        histories = {
            parameter: {**states.get(parameter, {}), "weft_reached": parameter in reached}
            for parameter, _, _ in self._pieces
        }
        self._build(histories)
        for state in self.twin.state.values():
            del state["weft_reached"]
        # A segment without state yet was given an entry by the marker alone.
        self.twin.state = defaultdict(dict, {key: value for key, value in self.twin.state.items() if value})

    def export_state(self) -> dict[int, dict[str, Any]]:
        """Per parameter, its piece of the state: flat tensors (views) over the owned part, and scalars."""
        pieces: dict[int, dict[str, Any]] = {}
        for segment in self.segments:
            state = self.twin.state.get(segment.tensor, {})
            for parameter, start, stop in self._pieces:
                if parameter not in segment.parameters or not state:
                    continue
                pieces[parameter] = {
                    key: value[start - segment.start : stop - segment.start]
                    if isinstance(value, torch.Tensor) and value.dim() == 1
                    else value
                    for key, value in state.items()
                }
        return pieces

    def import_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over a state given per parameter in full shape, as `optimizer.state_dict()` holds it."""
        pieces: dict[int, dict[str, Any]] = {}
        for slot in self.bucket.slots:
            full = states.get(slot.parameter)
            start, stop = max(slot.offset, self.owned.start), min(slot.end, self.owned.stop)
            if not full or start >= stop:
                continue
            pieces[slot.parameter] = {
                key: _flatten_like(value, slot)[start - slot.offset : stop - slot.offset]
                if isinstance(value, torch.Tensor) and value.dim() > 0
                else self._scalar(value)
                for key, value in full.items()
            }
        self._build(pieces)

    def make_room(self, kinds: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Replace the state: per parameter, dtypes of flat tensors, or scalars. Returns zeros to be filled in place."""
        lengths = {parameter: stop - start for parameter, start, stop in self._pieces}
        self._build(
            {
                parameter: {
                    key: torch.zeros(1, dtype=value).expand(lengths[parameter])
                    if isinstance(value, torch.dtype)
                    else self._scalar(value)
                    for key, value in kind.items()
                }
                for parameter, kind in kinds.items()
            }
        )
        return self.export_state()

    def _scalar(self, value: Any) -> Any:
        """Fused updates want their step counter on the device."""
        return value.to(self.master.device) if self.fused and isinstance(value, torch.Tensor) else value


def _flatten_like(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A full-shaped state tensor in the order in which the parameter's elements lie in memory."""
    flat = torch.empty(slot.numel, dtype=value.dtype, device=value.device)
    flat.as_strided(slot.shape, slot.stride).copy_(value.reshape(slot.shape))
    return flat


def _same_history(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two parameters' states agree in everything but the elementwise tensors."""
    if one.keys() != two.keys():
        return False
    for key, value in one.items():
        other = two[key]
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            if not isinstance(other, torch.Tensor) or other.dtype != value.dtype:
                return False
        elif isinstance(value, torch.Tensor) != isinstance(other, torch.Tensor) or not bool(value == other):
            return False
    return True
