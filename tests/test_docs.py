"""What the documentation shows is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.distributed
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="op names differ between versions")
def test_the_program_in_the_docs_is_the_one_that_the_example_prints() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(ROOT / "examples" / "small.py")], capture_output=True, text=True, timeout=120, check=True
    )
    page = (ROOT / "docs" / "how-a-step-is-compiled.md").read_text()
    shown = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    printed = run.stdout
    assert shown[1].strip() in printed, "the program"
    for line in shown[2].strip().splitlines():
        if not re.search(r"\d (ms|MiB|KiB|GiB)", line):  # what depends on the machine
            assert line in printed, "the plan in words"


def test_every_file_that_the_documentation_names_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
        for named in re.findall(r"`((?:weft|examples|tests|benchmarks)/[\w/.]+)`", page.read_text()):
            assert (ROOT / named).exists(), f"{page.name}: {named}"
