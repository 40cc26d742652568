"""How glibc's malloc is asked to keep a process's memory: no page faults in a step, and few gaps.

Left alone, malloc gives freed memory back to the system and takes it again, page by page, in every step. Told to keep
it, it also puts what stays for good (buckets, the arena, optimizer state, made in the middle of the first step) between
the values of that step, where it keeps them apart for ever. So the first step runs with large blocks mapped one by
one, and those after it in a heap that is kept. Elsewhere than with glibc, or where the environment sets malloc up
already, both functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys

from weft.state.shards import return_freed_memory

# From glibc's malloc.h. Setting either also ends malloc's own adjustment of both.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
APART = 128 << 10
NEVER = 1 << 30
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def map_large_blocks() -> None:
    """Before state is made: every block from 128 KiB on is mapped by itself and unmapped when it is freed."""
    _set(M_MMAP_THRESHOLD, APART)


def keep_heap() -> None:
    """After the first step: values come from the heap, which is never given back."""
    return_freed_memory()
    _set(M_MMAP_THRESHOLD, NEVER)
    _set(M_TRIM_THRESHOLD, NEVER)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name in os.environ for name in CHOSEN):
        mallopt(parameter, value)
