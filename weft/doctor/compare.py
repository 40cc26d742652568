"""Run a user's unmodified training script for a few steps, each of them in eager PyTorch too, and compare.

`weft.compile` then returns a `ComparedStep`. At every call it takes the whole state, runs the eager step from it, then
the compiled one, and compares loss, gradient norm, buffers, parameters and optimizer state. Both start each step from
the same values, so what differs was done by that step, and a script may load checkpoints or edit weights in between.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from weft import api
from weft.doctor.peers import leave_group
from weft.doctor.reference import EagerStep, Outcome, copied
from weft.errors import TraceError
from weft.trace.capture import Loss

# How far values may be apart, relative to the largest of their tensor; gradients' rounding, to the largest of all.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}

AGREES, DISAGREES, NOTHING_COMPARED = 0, 1, 2


@dataclass(frozen=True)
class Difference:
    """Of one tensor: the largest difference, relative to its largest value, and in units of what is allowed."""

    what: str  # "loss", "norm", "parameter layer.weight", ...
    relative: float
    excess: float
    rank: int = 0

    @property
    def agrees(self) -> bool:
        return self.excess <= 1.0  # False for a NaN

    @property
    def kind(self) -> str:
        return self.what.split(" ")[0]


@dataclass
class Comparison:
    """What has been seen so far: `steps` holds the differences of each step, of rank 0 first."""

    wanted: int
    rank: int = 0
    ranks: int = 1
    mode: str = ""
    steps: list[list[Difference]] = field(default_factory=list)
    problem: str | None = None
    reported: bool = False

    def first(self) -> tuple[int, Difference] | None:
        """The first step with a disagreement, and the first tensor in it."""
        for number, differences in enumerate(self.steps, 1):
            for difference in differences:
                if not difference.agrees:
                    return number, difference
        return None

    def exit_code(self) -> int:
        if self.problem is not None or self.first() is not None:
            return DISAGREES
        return AGREES if self.steps else NOTHING_COMPARED

    def report(self) -> str:
        if self.problem is not None:
            return f"weft doctor: {self.problem}"
        if not self.steps:
            return (
                "weft doctor: the script never called a step that weft.compile returned, so nothing was compared. Give "
                "it arguments with which it trains in this process"
            )
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        count = f"{len(self.steps)} step{'s' * (len(self.steps) > 1)}"
        found = self.first()
        if found is None:
            ranges = "; ".join(self._worst(kind) for kind in ("loss", "norm", "parameter", "buffer", "optimizer"))
            return f"weft doctor: {count} agree with eager PyTorch ({ranks}, mode {self.mode})\n  {ranges}"
        number, difference = found
        wrong = [one for one in self.steps[number - 1] if not one.agrees]
        worst = max(wrong, key=lambda one: one.excess if one.excess == one.excess else float("inf"))
        what = "gradient norm" if difference.kind == "norm" else difference.what
        lines = [
            f"weft doctor: step {number} does not agree with eager PyTorch ({ranks}, mode {self.mode})",
            f"  first: the {what}{self._at(difference)}: {difference.relative:.2e} of its largest value "
            f"apart, {difference.excess:.1e} times what rounding explains",
            f"  {len(wrong)} of {len(self.steps[number - 1])} compared values differ; the worst is the {worst.what}"
            f"{self._at(worst)}, {worst.relative:.2e}",
            f"  -> {self._advice(number, difference)}",
        ]
        return "\n".join(lines)

    def _at(self, difference: Difference) -> str:
        return f" on rank {difference.rank}" if self.ranks > 1 else ""

    def _worst(self, kind: str) -> str:
        label = {"loss": "loss", "norm": "gradient norm", "parameter": "parameters", "buffer": "buffers"}
        found = [one for step in self.steps for one in step if one.kind == kind]
        if not found:
            return f"no {label.get(kind, 'optimizer state')}"
        worst = max(found, key=lambda one: one.relative)
        name = worst.what.partition(" ")[2]
        where = f" ({name})" if name and worst.relative else ""
        return f"{label.get(kind, 'optimizer state')} within {worst.relative:.1e}{where}"

    def _advice(self, number: int, difference: Difference) -> str:
        if number > 1 and difference.kind in ("loss", "buffer"):
            return (
                f"{number - 1} step(s) agreed, from the same values: something that forward or the loss reads has "
                "changed since it was captured, and is not in the batch. weft watches plain attributes and globals, "
                "not what is inside lists, dicts and other objects: keep it in a plain attribute or a buffer, or pass "
                "it in the batch"
            )
        if difference.kind in ("parameter", "optimizer"):
            return (
                "the loss agrees and the update does not: look for hooks on gradients, or an optimizer that depends on "
                "more than gradients and its groups. If there is none, please report this with the script"
            )
        return "please report this with the script: the captured step computes something else than the model"


class Finished(BaseException):
    """Ends the script after the last compared step; not an Exception, so that scripts do not catch it."""


class ComparedStep(api.Step):
    """A compiled step that runs every step in eager PyTorch too."""

    comparison: Comparison  # set for the length of a script

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, options: Any) -> None:
        super().__init__(model, optimizer, loss, options)
        self.comparison.rank, self.comparison.ranks = self._collectives.rank, self._collectives.world
        self.comparison.mode = self._mode

    def __call__(self, batch: Any, *, micro_batches: int | None = None) -> Any:
        if self._first_values.pending:
            self.prepare(batch)  # a model on the meta device has values from then on
        before = self.state_dict()
        eager = EagerStep(
            self.model,
            self._loss,
            self.optimizer,
            before,
            clip_norm=self._options.clip_norm,
            compute=self._options.precision.compute,
            masters={info.name: info.master for info in self._infos},
            collectives=self._collectives,
        )
        if self._executor is None:
            eager.start_from_rank_0()
        first = {name: value.detach().clone() for name, value in eager.parameters.items()}
        kept = [copied(micro_batch) for micro_batch in self._micro_batches(batch, micro_batches)]
        output = super().__call__(batch, micro_batches=micro_batches)
        after = self.state_dict()
        expected = eager.run(kept)
        if not eager.gradients:
            self.comparison.problem = (
                "no gradient reaches the parameters of the model that the loss function is given; does it use another "
                "model than its first argument?"
            )
            self._finish()
        found = Outcome(
            output[0] if isinstance(output, tuple) else output,
            self.grad_norm,
            {name: after["model"][name] for name in expected.parameters},
            dict(self.model.named_buffers()),
            after["optimizer"]["state"],
        )
        mine = list(differences(found, expected, first, eager.gradients, self._precision()))
        everyone = self._collectives.gather_objects(mine)
        self.comparison.steps.append(
            [
                Difference(one.what, one.relative, one.excess, rank)
                for rank, all_of in enumerate(everyone)
                for one in all_of
            ]
        )
        if len(self.comparison.steps) == self.comparison.wanted or self.comparison.first() is not None:
            self._finish()
        return output

    def _finish(self) -> None:
        """Report, and leave the script; only then may a rank go: torchrun ends the others when one has failed."""
        if self.comparison.rank == 0:
            print(self.comparison.report(), flush=True)
        self.comparison.reported = True
        self._collectives.gather_objects(None)
        raise Finished

    def _precision(self) -> torch.dtype:
        """The coarsest dtype in which numbers are made (autocast, a norm in fp32): how far they may be apart."""
        found = {dtype for info in self._infos for dtype in (info.compute, info.reduce)}
        for entry in self._plan_of:
            values = (node.meta.get("val") for node in entry.trace.graph.nodes)
            found |= {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return max(found & TOLERANCE.keys(), key=lambda dtype: TOLERANCE[dtype])


def differences(
    found: Outcome,
    expected: Outcome,
    first: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    precision: torch.dtype,
) -> Iterator[Difference]:
    """Every tensor's difference: loss, buffers, norm, parameters, optimizer state.

    A gradient is exact to rounding, relative to the largest one, and Adam makes a whole step of one that is nothing but
    rounding (a key's bias): an element's update may be off by as large a part as its gradient may be.
    """
    tolerance, rounding = TOLERANCE[precision], ROUNDING[precision]
    yield _difference("loss", found.loss, expected.loss, tolerance * _largest(expected.loss))
    for name, value in expected.buffers.items():
        yield _difference(f"buffer {name}", found.buffers[name], value, tolerance * _largest(value))
    if expected.norm is not None:
        norms = torch.tensor([torch.nan if found.norm is None else found.norm, expected.norm], dtype=torch.float64)
        yield _difference("norm", norms[0], norms[1], tolerance * expected.norm)
    noise = rounding * max(float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel())
    for name, value in expected.parameters.items():
        mine, theirs, start = (
            t.detach().to("cpu", torch.float64) for t in (found.parameters[name], value, first[name])
        )
        allowed = torch.full_like(theirs, tolerance * _largest(theirs))
        if name in gradients:
            share = (noise / gradients[name].abs().to("cpu", torch.float64)).clamp(max=2.0)
            allowed += torch.maximum((mine - start).abs(), (theirs - start).abs()) * share
        yield _difference(f"parameter {name}", mine, theirs, allowed)
    for name, state in expected.optimizer.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                other = found.optimizer.get(name, {}).get(key, torch.tensor(torch.nan))
                limit = tolerance * _largest(value) + noise * max(1.0, noise / rounding)
                yield _difference(f"optimizer state {key} of {name}", torch.as_tensor(other), value, limit)


def _difference(what: str, found: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float) -> Difference:
    mine, theirs = (tensor.detach().to("cpu", torch.float64) for tensor in (found, expected))
    if mine.shape != theirs.shape:
        return Difference(what, float("inf"), float("inf"))
    apart = (mine - theirs).abs()
    apart[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0.0
    if not apart.numel() or not bool((apart != 0).any()):
        return Difference(what, 0.0, 0.0)
    limit = allowed if isinstance(allowed, torch.Tensor) else torch.full_like(apart, allowed)
    return Difference(what, float(apart.max()) / max(_largest(theirs), 1e-300), float((apart / limit).max()))


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def run_script(command: Sequence[str], steps: int) -> Comparison:
    """Run a script as `python script.py arguments...` would, comparing every compiled step; says what was seen."""
    comparison = Comparison(wanted=steps)
    script = Path(command[0])
    if not script.is_file():
        raise FileNotFoundError(f"{command[0]}: there is no such script")
    ComparedStep.comparison = comparison
    kept = sys.argv, sys.path[0], api.Step, weft.Step
    sys.argv, sys.path[0] = [str(script), *command[1:]], str(script.resolve().parent)
    api.Step = weft.Step = ComparedStep  # type: ignore[misc]  # what weft.compile constructs, however it was imported
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Finished:
        pass
    except TraceError as error:
        comparison.problem = f"weft does not compile this step: {error}"
    except SystemExit as error:
        if error.code and not comparison.steps:
            comparison.problem = f"the script ended with exit code {error.code} before its first step"
    except Exception:
        traceback.print_exc()
        comparison.problem = f"the script failed after {len(comparison.steps)} compared steps (see above)"
    finally:
        sys.argv, sys.path[0], api.Step, weft.Step = kept  # type: ignore[misc]
        leave_group()
    return comparison
