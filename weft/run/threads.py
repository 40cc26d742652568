"""Keep gloo's threads from spinning on a core that compute needs.

gloo's event loop tries for a lock that the program holds while it posts a message. Where both share a core, it may
be woken in the middle of that and spins for a whole scheduler slice: 4 ms, twenty times what the call takes. Threads of
the class SCHED_BATCH do not interrupt others when they wake, and still get their share. Nothing is changed where cores
are left for them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

GLOO = "gloo"  # how PyTorch and gloo name their threads


def calm_gloo() -> None:
    """Call it when the groups are made, with their threads running."""
    if sys.platform != "linux":
        return
    ranks_here = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    if torch.get_num_threads() * ranks_here < len(os.sched_getaffinity(0)):
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):  # a thread may have ended, a sandbox may forbid it
            thread = int(task.name)
            named = GLOO in (task / "comm").read_text()
            if named and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
