"""Run gpt.py on two processes of this machine for about a minute: what `make demo` calls.

`torchrun --nproc-per-node 2 examples/gpt.py` does the same; started directly, the processes get the terminal's Ctrl-C
themselves and end the training after the current step, where torchrun would print a traceback of its own. Started
again, an interrupted or killed demo goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

WORLD = 2


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # gpt.py handles it once it is up; this process waits for it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    environment |= {"LOCAL_WORLD_SIZE": str(WORLD)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or WORLD) // WORLD)))
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, default=Path("out"))
    checkpoint = parser.parse_known_args()[0].out / "checkpoint"
    script = Path(__file__).with_name("gpt.py")
    command = [sys.executable, str(script), "--checkpoint", str(checkpoint), *sys.argv[1:]]
    children = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(WORLD)
    ]
    while all(child.poll() is None for child in children):
        time.sleep(0.1)
    failed = next((child.returncode for child in children if child.poll()), 0)
    for child in children:
        if failed:
            child.terminate()
        child.wait()
    return failed or max(child.returncode for child in children)


if __name__ == "__main__":
    raise SystemExit(main())
