"""Tables, charts and the README's figures, all made from benchmarks/results/*.json.

python -m benchmarks.report
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import PEERS, REFERENCES
from weft.lab.cluster import available_cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20
Result = Mapping[str, Any]


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor,
        "cores": available_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("weft", "transformers", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def passes(result: Result, peer: str) -> float:
    """Passes of all parameters over the wire in a step: what the contestant's plan says, or what its kind sends."""
    said = result["outcomes"][peer].get("passes")
    return PEERS[peer].passes(result.get("accumulate", 1)) if said is None else float(said)


def bound(result: Result, passes: float) -> float | None:
    """Seconds of a step in which compute and communication overlap fully.

    Nothing hides the CPU time that communication takes on the core that computes.
    """
    compute, wire = (result["outcomes"][name] for name in REFERENCES)
    if compute["why_not"] or wire["why_not"]:
        return None
    cpu = _wire_cpu(result) or 0.0
    return max(passes * _median(wire["seconds"]), _median(compute["seconds"]) + passes * cpu)


def _wire_cpu(result: Result) -> float | None:
    """CPU seconds of one pass; None where it was not measured."""
    measured = result["outcomes"]["wire"].get("cpu_seconds")
    return _median(measured) if measured else None


def markdown(result: Result) -> str:
    """One comparison as a table; ratios below 1 are faster than the baseline."""
    baseline = PEERS[result["baseline"]].title
    lines = [
        f"### {title(result)}",
        "",
        f"| | time / {baseline} | quartiles | s/step | x bound | sent MiB/step | peak MiB/rank | start s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for peer, outcome in result["outcomes"].items():
        if peer in REFERENCES:
            continue
        name = outcome["title"] + "".join(f", {key} {value}" for key, value in outcome["settings"].items())
        if outcome["why_not"]:
            lines.append(f"| {name} | cannot run: {outcome['why_not'].replace('|', '/')[:200]} | | | | | | |")
            continue
        low, middle, high = _quartiles(outcome["ratios"])
        seconds = _median(outcome["seconds"])
        least = bound(result, passes(result, peer))
        lines.append(
            f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} | {seconds:.3f} | "
            f"{f'{seconds / least:.2f}' if least else ''} | {outcome['sent_bytes'] / MIB:.1f} | "
            f"{outcome['peak_bytes'] / MIB:.0f} | {outcome['start_seconds']:.1f} |"
        )
    compute, wire = (result["outcomes"][name] for name in REFERENCES)
    cpu = _wire_cpu(result)
    taken = "" if cpu is None else f" (and {cpu:.3f} s of CPU, which the bound adds to compute)"
    lines += [
        "",
        f"{result['parameters'] / 1e6:.1f} M parameters, fp32, AdamW{_settings(result)}; {result['lab']}. Compute "
        f"alone {_median(compute['seconds']):.3f} s, one pass of the parameters over the wire "
        f"{_median(wire['seconds']):.3f} s{taken}. Median of {result['rounds']} interleaved rounds of "
        f"{result['steps_a_turn']} steps.",
    ]
    return "\n".join(lines)


def title(result: Result) -> str:
    speeds = sorted(set(result["gbit"]))
    return (
        f"{result['workload']} ({result['size']}), {result['hosts']} hosts, {'/'.join(f'{s:g}' for s in speeds)} Gbit/s"
        f"{_settings(result)}{', ablations' if result.get('ablations') else ''}"
    )


def _settings(result: Result) -> str:
    """What a step does beside forward, backward and update."""
    clip, accumulate = result.get("clip"), result.get("accumulate", 1)
    clipped = "" if clip is None else f", clipped to norm {clip:g}"
    return clipped + (f", {accumulate} micro-batches a step" if accumulate > 1 else "")


def file_name(result: Result, part: int = 0) -> str:
    """Of a comparison's JSON, or of one part of it."""
    speeds = sorted(set(result["gbit"]))
    link = f"{speeds[0]:g}" if len(speeds) == 1 else "mixed"
    name = f"{result['workload']}-{result['size']}-{result['hosts']}x{link}"
    name += "-clip" if result.get("clip") is not None else ""
    name += f"-acc{result['accumulate']}" if result.get("accumulate", 1) > 1 else ""
    name += "-ablations" if result.get("ablations") else ""
    return f"{name}-{part + 1}.json" if part else f"{name}.json"


def _median(values: list[float]) -> float:
    return _quartiles(values)[1]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    from benchmarks.rounds import spread

    return spread(values)


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every recorded comparison; the parts of one (see AT_A_TIME) are put together."""
    merged: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*x*.json")):
        result = json.loads(path.read_text())
        first = merged.setdefault(title(result), result)
        for peer, outcome in result["outcomes"].items():
            first["outcomes"].setdefault(peer, outcome)
    return list(merged.values())


def page(results: list[dict[str, Any]]) -> str:
    """benchmarks/results/README.md."""
    machines = {
        f"{r['machine']['processor']}, {r['machine']['cores']} cores, {r['machine']['memory_gib']} GiB, "
        f"{r['machine']['system']}; Python {r['versions']['python']}, PyTorch {r['versions']['torch']}, transformers "
        f"{r['versions']['transformers']}, DeepSpeed {r['versions']['deepspeed']}"
        for r in results
    }
    notes = RESULTS / "NOTES.md"
    parts = [
        "# Results",
        "Made by `python -m benchmarks.report` from the JSON files beside this page; do not edit. Ratios are to the "
        "baseline in the same round, below 1 is faster. *x bound*: over the time of a step that hides all of its "
        "communication behind compute, or all compute behind communication; the CPU time of communication adds to "
        "compute, where it was measured.",
        *(f"Machine: {machine}." for machine in sorted(machines)),
        *([notes.read_text().strip()] if notes.exists() else []),
        *(f"{markdown(result)}\n\n![{title(result)}]({picture(result)})" for result in results),
    ]
    return "\n\n".join(parts) + "\n"


def picture(result: Result) -> str:
    return re.sub(r"[^\w.]+", "-", title(result)).strip("-").lower() + ".png"


def chart(result: Result, path: Path) -> None:
    """Step times as bars, with quartiles and the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {peer: o for peer, o in result["outcomes"].items() if peer in PEERS and not o["why_not"]}
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(runs) + 1.2))
    for row, (peer, outcome) in enumerate(reversed(runs.items())):
        low, middle, high = _quartiles(outcome["seconds"])
        color = "tab:orange" if peer.startswith("weft") else "tab:blue"
        axes.barh(row, middle, color=color, xerr=[[middle - low], [high - middle]], ecolor="black")
        least = bound(result, passes(result, peer))
        if least:
            axes.plot([least, least], [row - 0.4, row + 0.4], color="black", linestyle=":")
    axes.set_yticks(range(len(runs)), [outcome["title"] for outcome in reversed(runs.values())])
    axes.set_xlabel("seconds per step (dotted: its bound)")
    axes.set_title(title(result), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def one_rank_sentence(result: Result) -> str:
    return (
        f"On one rank a compiled step of a 12.3 M parameter GPT takes {result['ratio']:.2f} times eager's time, and "
        f"tracing and\nplanning take {result['planning']:.1f} s (`python -m benchmarks.one_rank`; one core of an "
        f"{result['machine']['processor']}, PyTorch {result['versions']['torch']})."
    )


MARK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def with_figures(text: str, results: list[dict[str, Any]]) -> str:
    """A page whose marked sections hold what the results say."""
    one_rank = RESULTS / "one_rank.json"
    sections = {re.sub(r"\.png$", "", picture(result)): markdown(result).split("\n", 2)[2] for result in results}
    if one_rank.exists():
        sections["one-rank"] = one_rank_sentence(json.loads(one_rank.read_text()))

    def fill(match: re.Match[str]) -> str:
        if match[2] not in sections:
            raise ValueError(f"no result is named {match[2]!r}; there are {', '.join(sections)}")
        return f"{match[1]}{sections[match[2]]}{match[3]}"

    return MARK.sub(fill, text)


def main() -> None:
    results = load()
    (RESULTS / "README.md").write_text(page(results))
    for result in results:
        chart(result, RESULTS / picture(result))
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text(), results))
    print(f"{len(results)} comparisons: {RESULTS / 'README.md'}, {readme}")


if __name__ == "__main__":
    main()
