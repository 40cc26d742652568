"""`weft.save`: the state of a step into a folder, now or in the background."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from weft._torch import save_flat
from weft.errors import CheckpointError
from weft.run.collectives import Local, peers_lost
from weft.saving.contents import collect
from weft.saving.planner import Flat, FlatSavePlanner, Part
from weft.saving.storage import POINTER, FolderWriter, sweep

if TYPE_CHECKING:
    from weft.api import Step


class Saving:
    """A save that may still be under way."""

    def __init__(self, action: Callable[[], None], path: Path, background: bool) -> None:
        self.path = path
        self._action = action
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft.save", daemon=True) if background else None
        if self._thread is None:
            action()
        else:
            self._thread.start()
            # No daemon: the interpreter does not exit before this one ends.
            threading.Thread(target=self._hold_the_exit, name="weft.save's end").start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _hold_the_exit(self) -> None:
        """Until the save has ended, or cannot: a rank that has lost another goes at once, or the rest wait for it."""
        while not self._ended.wait(0.05) and not peers_lost.is_set():
            pass

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is on the disk; raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


_latest: Saving | None = None


def wait_for_latest() -> None:
    """One save at a time: the next one, and a load, wait for that before and raise its error."""
    global _latest
    latest, _latest = _latest, None
    if latest is not None:
        latest.wait()


@atexit.register
def _report_failure() -> None:
    """The interpreter has waited for the last save by now; if nobody asked how it went, say so."""
    if _latest is not None and _latest._error is not None:
        print(f"weft.save in the background failed: {_latest._error}", file=sys.stderr)


def save(step: Step, path: str | os.PathLike[str], extra: Any = None, background: bool = False) -> Saving:
    """Write everything that is needed to go on into the folder `path`; all ranks must call it.

    The checkpoint that is there already stays the checkpoint until the new one is complete, whatever happens.

    Args:
        step: what `weft.compile` returned.
        path: a folder that all ranks see; made if it is not there.
        extra: what `weft.load` is to return: plain values and tensors, for instance a scheduler's state_dict(). Rank
            0's is kept.
        background: copy the state to the CPU and return; a thread writes it. The next save, the next load and the end
            of the interpreter wait for it.

    Returns:
        A handle with `wait()`, which raises if the save failed, and `done()`.
    """
    global _latest
    step._check_usable()
    wait_for_latest()
    path = Path(path)
    collectives = step._collectives
    problem: str | None = None
    facts: dict[str, Any] = {}
    flats: dict[str, Flat] = {}
    try:
        facts, flats = collect(step, extra)
        if background:
            flats = {name: _snapshot(flat) for name, flat in flats.items()}
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = str(error) if isinstance(error, TypeError) else describe(error)
    unique = uuid.uuid4().hex[:8]
    answers = agree(collectives, f"nothing was saved to {path}", problem, (str(path.absolute()), unique))
    paths = [answer[0] for answer in answers]
    if len(set(paths)) > 1:
        raise CheckpointError(f"the ranks save to different paths: {', '.join(sorted(set(paths)))}")
    name = f"data-{step.steps:08d}-{answers[0][1]}"
    group = collectives.saving_group()

    def write() -> None:
        _write(collectives, group, path, name, facts, flats)

    _latest = Saving(write, path, background)
    return _latest


def agree(collectives: Local, what: str, problem: str | None, value: Any = None) -> list[Any]:
    """Every rank's value; or an error on all of them if one has a problem."""
    answers = collectives.gather_objects((problem, value))
    raise_together(collectives, what, {rank: problem for rank, (problem, _) in enumerate(answers) if problem})
    return [value for _, value in answers]


def raise_together(collectives: Local, what: str, problems: dict[int, str]) -> None:
    """Say what was wrong and on which ranks, each thing once."""
    if not problems:
        return
    ranks: dict[str, list[str]] = {}
    for rank, problem in problems.items():
        ranks.setdefault(problem, []).append(str(collectives.ranks[rank]))
    told = [f"rank{'s' if len(of) > 1 else ''} {', '.join(of)}: {problem}" for problem, of in ranks.items()]
    raise CheckpointError(f"{what}: {'; '.join(told)}")


def _snapshot(flat: Flat) -> Flat:
    return replace(flat, parts=tuple(Part(p.offset, p.length, _copied(p.resolve())) for p in flat.parts))


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", copy=True)


def _write(
    collectives: Local, group: Any, path: Path, name: str, facts: dict[str, Any], flats: dict[str, Flat]
) -> None:
    writer, planner = FolderWriter(path, name, collectives.rank), FlatSavePlanner(facts)

    def write() -> None:
        save_flat(flats, writer, group, 0, collectives.world == 1, planner)

    try:
        collectives.named(write, f"the save to {path}")
    except CheckpointException as failure:
        if collectives.rank == 0:
            sweep(path)
        if group is not None:  # nobody hears of the failure before everything is cleared away
            collectives.named(lambda: dist.barrier(group), f"the end of the save to {path}")
        left = "the checkpoint before it is untouched" if (path / POINTER).exists() else "there is no checkpoint yet"
        raise_together(collectives, f"the save to {path} failed, and {left}", failed_ranks(failure))


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def failed_ranks(failure: CheckpointException) -> dict[int, str]:
    return {rank: describe(error) for rank, (error, _) in failure.failures.items()}
