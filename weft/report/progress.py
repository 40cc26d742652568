"""One line that says what planning is doing, while it does."""

from __future__ import annotations

import sys
import time
from types import TracebackType

PATIENCE = 1.0  # seconds: what takes no longer is not worth a line
EVERY = 0.1


class Progress:
    """Call it with what is being done; shown on a terminal, and gone when it ends."""

    def __init__(self, who: str, *, shown: bool) -> None:
        self.who = who
        self.shown = shown and sys.stderr.isatty()
        self.started = self.last = time.monotonic()
        self.width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if not self.shown or now - self.started < PATIENCE or now - self.last < EVERY:
            return
        self.last = now
        text = f"{self.who}: {what} ({now - self.started:.0f} s)"
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = max(self.width, len(text))
