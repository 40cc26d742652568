"""`weft doctor`: is the machine fit (under torchrun: are its peers), or does a script train as eager would."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from weft.doctor.compare import NOTHING_COMPARED, run_script
from weft.doctor.findings import Finding, report, summary
from weft.doctor.machine import check_machine
from weft.doctor.network import check_network
from weft.doctor.peers import check_peers, world_size


def examine(timeout: float) -> int:
    """Print what there is to say about this machine and its peers; 1 if something is wrong."""
    findings: list[Finding]
    if world_size() > 1:
        findings, prints = check_peers(timeout)
    else:
        findings, prints = [*check_machine(), *check_network()], True
    if prints:
        typer.echo(f"{report(findings)}\n{summary(findings)}")
    # The others leave the verdict to the rank that prints: torchrun ends all ranks when one exits with an error.
    return 1 if prints and any(finding.mark == "FAIL" for finding in findings) else 0


def compare(command: Sequence[str], steps: int) -> int:
    """Run a script with its first steps compared with eager: 0 if they agree, 1 if not, 2 if none was compared."""
    try:
        comparison = run_script(command, steps)
    except FileNotFoundError as error:
        typer.echo(f"weft doctor: {error}", err=True)
        return NOTHING_COMPARED
    if not comparison.reported:  # the script ended by itself, perhaps on this rank only
        typer.echo(comparison.report())
    return comparison.exit_code()
