"""Work like a training step's, to see how compute and messages slow each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.measure.clock import Clock

ROWS, WIDTH, WIDE = 256, 384, 1536
STREAMED = 1 << 20  # elements of what the memory-bound half goes through


class Load:
    """Rounds of matrix products and of memory-bound ops, about half the time each; allocates nothing once made."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.inputs = torch.ones(ROWS, WIDTH, device=device)
        self.weight = torch.ones(WIDTH, WIDE, device=device)
        self.product = torch.empty(ROWS, WIDE, device=device)
        self.source = torch.ones(STREAMED, device=device)
        self.target = torch.ones(STREAMED, device=device)
        self.streams = 1
        for _ in range(3):
            product, stream = self._time(self._multiply), self._time(self._stream)
        self.streams = max(1, min(50, round(product / stream)))
        self.seconds = self._time(self.round)  # of one round

    def _multiply(self) -> None:
        torch.mm(self.inputs, self.weight, out=self.product)

    def _stream(self) -> None:
        torch.add(self.source, self.target, alpha=0.5, out=self.target)
        torch.tanh(self.source[: STREAMED // 16], out=self.target[: STREAMED // 16])

    def round(self) -> None:
        self._multiply()
        for _ in range(self.streams):
            self._stream()

    def _time(self, work: Callable[[], None]) -> float:
        started = self.clock.now()
        work()
        return self.clock.between(started, self.clock.now())
