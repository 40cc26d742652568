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
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    script = Path(__file__).with_name("gpt.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--signals-to-handle", "SIGTERM"]
    command = [*torchrun, "--nproc-per-node", "2", str(script), *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
