"""What the doctor finds: one aligned line each, and what to do about it where something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Mark = Literal["OK", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        mark: FAIL makes the command's exit code 1; warn is worth a look.
        subject: a word or two.
        text: what was found.
        advice: what to do about it.
    """

    mark: Mark
    subject: str
    text: str
    advice: str = ""

    def lines(self) -> list[str]:
        first = f"{self.mark:>4}  {self.subject:<12}  {self.text}"
        return [first] + ([f"{'':20}-> {self.advice}"] if self.advice else [])


def report(findings: Iterable[Finding]) -> str:
    return "\n".join(line for finding in findings for line in finding.lines())


def summary(findings: Iterable[Finding]) -> str:
    marks = [finding.mark for finding in findings]
    problems, warnings = marks.count("FAIL"), marks.count("warn")
    if not problems and not warnings:
        return "everything is fine"
    parts = [f"{problems} problem{'s' * (problems != 1)}"] if problems else ["no problems"]
    if warnings:
        parts.append(f"{warnings} thing{'s' * (warnings != 1)} worth a look")
    return ", ".join(parts)
