"""`weft measure`: the rates of this machine and, with a script, the time of each op of its first step.

The script runs as it is until it calls the step that `weft.compile` returned; that step is planned, its ops are
measured one by one, and the script ends there.
"""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer

import weft
from weft import api
from weft.doctor.peers import leave_group
from weft.errors import StoreError
from weft.measure.ops import measure_ops
from weft.measure.store import Store
from weft.options import budget_bytes
from weft.predict.ops import OpTimes
from weft.predict.roofline import Roofline, measure_roofline

GOOD, BAD_INPUT = 0, 2
BAR = 40


class Measured(BaseException):
    """Ends the script after its ops were measured; not an Exception, so that scripts do not catch it."""


class MeasuredStep(api.Step):
    """A compiled step whose ops are measured where it would run first."""

    folder: Path  # set for the length of a script

    def __call__(self, batch: Any, *, micro_batches: int | None = None) -> Any:
        plan = self.prepare(batch)
        nodes = [node for program in plan.programs.values() for node in program.graph.nodes]
        store = Store(self.folder, self._device)
        roofline = measure_roofline(self._device, store)
        start = time.perf_counter()
        found = measure_ops(
            nodes,
            store,
            device=self._device,
            memory_limit=budget_bytes(self._options.memory, self._device),
            progress=show_progress if sys.stderr.isatty() else None,
        )
        took = time.perf_counter() - start
        store.save()
        times = OpTimes(store, roofline)
        typer.echo(
            f"weft measure: {len(found)} distinct ops of {len(nodes)} nodes, in {took:.1f} s; one after the other the "
            f"step's take {sum(times.seconds(node) for node in nodes):.4f} s, update and communication apart"
        )
        typer.echo(_kept(store))
        raise Measured


def measure_script(command: Sequence[str], folder: Path) -> int:
    """Run a script as `python script.py arguments...` would, up to its first step, whose ops are measured."""
    script = Path(command[0])
    if not script.is_file():
        typer.echo(f"weft measure: {command[0]}: there is no such script", err=True)
        return BAD_INPUT
    MeasuredStep.folder = folder
    kept = sys.argv, sys.path[0], api.Step, weft.Step
    sys.argv, sys.path[0] = [str(script), *command[1:]], str(script.resolve().parent)
    api.Step = weft.Step = MeasuredStep  # type: ignore[misc]  # what weft.compile constructs, however it was imported
    problem = "the script never called a step that weft.compile returned, so there is nothing to measure"
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Measured:
        return GOOD
    except StoreError:
        raise
    except SystemExit as error:
        if error.code:
            problem = f"the script ended with exit code {error.code} before its first step"
    except Exception:
        traceback.print_exc()
        problem = "the script failed before its ops were measured (see above)"
    finally:
        sys.argv, sys.path[0], api.Step, weft.Step = kept  # type: ignore[misc]
        leave_group()
    typer.echo(f"weft measure: {problem}", err=True)
    return BAD_INPUT


def measure_machine(folder: Path) -> int:
    """Measure the rates of this machine's device."""
    device = _device()
    store = Store(folder, device)
    typer.echo(describe_rates(measure_roofline(device, store)))
    store.save()
    typer.echo(_kept(store))
    return GOOD


def show_store(folder: Path) -> int:
    """Print what is known of this machine."""
    store = Store(folder, _device())
    typer.echo(", ".join(f"{key} {value}" for key, value in store.machine.items()))
    sections = store.sections()
    for name in ("ops", "links", "tiers"):
        typer.echo(f"{name}: {len(sections.get(name, {}))} measured")
    rates = store.get("roofline", "rates")
    typer.echo("rates: none measured" if rates is None else describe_rates(Roofline(**rates)))
    typer.echo(f"in {store.path}")
    return GOOD


def describe_rates(roofline: Roofline) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in roofline.flops_per_second.items())
    return (
        f"rates: {rates} GFLOP/s; memory {roofline.bytes_per_second / 1e9:.1f} GB/s; "
        f"a call {roofline.dispatch_seconds * 1e6:.1f} us"
    )


def show_progress(done: int, total: int) -> None:
    """A bar on stderr."""
    filled = BAR * done // total
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (BAR - filled)}] {done} of {total} ops{end}")
    sys.stderr.flush()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _kept(store: Store) -> str:
    return "nothing is kept on disk" if store.path is None else f"kept in {store.path}"
