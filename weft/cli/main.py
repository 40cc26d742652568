"""The `weft` command: `lab` runs a script on emulated hosts, `doctor` examines a machine, its peers or a script,
`measure` times a machine's ops.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.lab.check import check_links
from weft.lab.cluster import Shape
from weft.lab.errors import LabError
from weft.lab.launch import run_script
from weft.options import check_memory

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def weft() -> None:
    """A compiler for distributed PyTorch training steps."""


@app.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the script, for instance python train.py")
    ] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts")] = 2,
    gbit: Annotated[str, typer.Option(help="Speed of their links in Gbit/s: one number, or one a host: 1,0.5")] = "1",
    cores: Annotated[int, typer.Option(help="Cores of a host")] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory of a host, for instance 1.5GiB")] = None,
    processes: Annotated[int, typer.Option(help="Processes (ranks) a host")] = 1,
    oversubscribe: Annotated[bool, typer.Option("--oversubscribe", help="Let hosts share cores")] = False,
    check: Annotated[bool, typer.Option("--check", help="Measure what the links deliver instead")] = False,
) -> None:
    """Run a script by torchrun on emulated hosts: networks of a given speed, cores and memory of their own."""
    try:
        shape = Shape(parse_speeds(gbit, hosts), _at_least_one("cores", cores), parse_memory(memory), oversubscribe)
        if check:
            raise typer.Exit(0 if check_links(shape) else 1)
        raise typer.Exit(run_script(command or [], shape, _at_least_one("processes", processes)))
    except LabError as error:
        typer.echo(f"weft lab: {error}", err=True)
        raise typer.Exit(2) from None


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def doctor(
    script: Annotated[
        list[str] | None, typer.Argument(help="A training script and its arguments, to compare with eager")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for other ranks")] = 30.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the script to compare")] = 3,
) -> None:
    """Examine this machine (under torchrun its peers too), or whether a script's steps agree with eager PyTorch."""
    from weft.cli.doctor import compare, examine  # the lab's users need not wait for these imports

    if script:
        raise typer.Exit(compare(script, steps))
    raise typer.Exit(examine(timeout))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def measure(
    script: Annotated[
        list[str] | None, typer.Argument(help="A training script and its arguments, whose ops are measured")
    ] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Folder of the measurements")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what has been measured, and measure nothing")] = False,
) -> None:
    """Measure this machine's rates, and what each op of a script's first step takes."""
    from weft.cli.measure import measure_machine, measure_script, show_store  # imports torch
    from weft.errors import StoreError
    from weft.measure.store import default_folder

    folder = default_folder() if cache_dir is None else Path(cache_dir)
    try:
        if show:
            raise typer.Exit(show_store(folder))
        raise typer.Exit(measure_script(script, folder) if script else measure_machine(folder))
    except StoreError as error:
        typer.echo(f"weft measure: {error}", err=True)
        raise typer.Exit(2) from None


def parse_speeds(text: str, hosts: int) -> tuple[float, ...]:
    _at_least_one("hosts", hosts)
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or any(not 0.001 <= speed <= 100 for speed in speeds):
        raise LabError(f"--gbit {text}: one number from 0.001 to 100, or one for each host with commas between")
    if len(speeds) not in (1, hosts):
        raise LabError(f"--gbit {text}: {len(speeds)} speeds for {hosts} hosts; give one for all, or one for each")
    return tuple(speeds * hosts if len(speeds) == 1 else speeds)


def parse_memory(text: str | None) -> int | None:
    try:
        value = None if text is None else check_memory(text)
    except ValueError:
        value = 0.0
    if isinstance(value, float):
        raise LabError(f"--memory {text}: bytes with a unit, for instance 1.5GiB or 800MiB")
    return value


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise LabError(f"--{name} {value}: at least 1")
    return value


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a lab cleans up
    app()


if __name__ == "__main__":
    main()
