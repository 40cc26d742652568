"""One clock for devices that work while Python waits for them and for those that work behind its back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

Moment: TypeAlias = "float | torch.cuda.Event"


class Clock:
    """Moments in a device's work: on a GPU events in its stream, elsewhere the time of day."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def between(start: Moment, end: Moment) -> float:
        """Seconds from one moment to the other; waits until the second has passed."""
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(end, float)
        return end - start


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float, Any]:
    """Seconds on the device, seconds that the host took to issue it (on a CPU they are one), and the result.

    Where one thread computes, the time in which other processes had its core does not count.
    """
    if device.type != "cuda":
        used = time.thread_time()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        used = time.thread_time() - used  # the more, unless the thread was interrupted: it is the outer clock
        if torch.get_num_threads() == 1:
            seconds = min(seconds, used)
        return seconds, seconds, result
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    start = time.perf_counter()
    result = call()
    host = time.perf_counter() - start
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3, host, result


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory, in bytes."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 << 20
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20
