"""Run gpt.py on two processes of this machine for about a minute: what `make demo` calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    # Ctrl-C reaches every process of the terminal. The training handles it; torchrun and this launcher wait for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = {**os.environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    script = Path(__file__).with_name("gpt.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run([*command, *sys.argv[1:]], env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
