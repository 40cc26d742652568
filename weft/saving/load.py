"""`weft.load`: a checkpoint into a step of any mode, world size and dtypes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import CheckpointException

from weft._torch import load_flat, plain_tensor_access
from weft.errors import CheckpointError
from weft.run.collectives import Local
from weft.saving import contents
from weft.saving.contents import Wanted
from weft.saving.planner import Flat, FlatLoadPlanner, Part
from weft.saving.save import agree, describe, failed_ranks, raise_together, wait_for_latest
from weft.saving.storage import FolderReader, read_pointer
from weft.state.safetensors import DTYPES

if TYPE_CHECKING:
    from weft.api import Step


def load(step: Step, path: str | os.PathLike[str]) -> Any:
    """Go on from what `weft.save` wrote, in this or another mode or world size; returns its `extra`.

    All ranks must call it. Everything is checked on all ranks before anything is changed. Before the first step the
    model's own tensors take their values at once, and the optimizer's state is read when the first step needs it.
    """
    step._check_usable()
    wait_for_latest()
    path = Path(path)
    collectives = step._collectives
    body = _read_together(collectives, path)
    reader = FolderReader(path, body)
    try:
        _check(step, reader)
    except BaseException:
        reader.close()
        raise
    try:
        return _apply(step, reader)
    except BaseException as error:
        step._failed = f"weft.load: {describe(error)}"
        raise


def _check(step: Step, reader: FolderReader) -> None:
    """Raise on every rank unless everything is there, as it was written, and fits the step."""
    collectives, path = step._collectives, reader.folder.parent
    problem = None
    try:
        problem = "; ".join(contents.mismatches(step, reader.body)) or None
        if problem is None:
            reader.open()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = describe(error)
    agree(collectives, f"the checkpoint in {path} cannot be loaded", problem)
    try:
        reader.verify(collectives.rank, collectives.world)
    except Exception as error:
        problem = describe(error)
    agree(collectives, f"the checkpoint in {path} cannot be loaded", problem)


def _read_together(collectives: Local, path: Path) -> dict[str, Any]:
    """The pointer as rank 0 sees it now: another job may be replacing it."""
    answer: tuple[dict[str, Any] | None, str | None] = (None, None)
    if collectives.rank == 0:
        try:
            answer = (read_pointer(path), None)
        except CheckpointError as error:
            answer = (None, str(error))
    body, problem = collectives.gather_objects(answer)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return body


def _apply(step: Step, reader: FolderReader) -> Any:
    body, wanted = reader.body, Wanted()
    executor, elementwise = step._executor, step._probe.elementwise
    step.drain()
    groups = contents.want_groups(body, wanted)
    extra = contents.want_common(step, body, wanted)
    random = contents.want_random(step, body, wanted)
    whole = {} if elementwise else contents.whole_optimizer_state(step, body, wanted)
    for held in executor.states if executor is not None else ():
        contents.want_masters(held, wanted, range(len(step._infos)))
        if elementwise and held.fragment is None:
            contents.want_optimizer(held, body, wanted)
    _read(step, reader, wanted)
    if executor is not None:
        _read_fragments(step, reader)
    contents.put_groups(step, groups)
    contents.put_random(step, body, random)
    step.steps = body["steps"]
    if not elementwise:
        step._import_optimizer(whole)
    if executor is None:
        # The same buckets as before, whatever is measured now: sums of norms round by what each rank holds.
        step._plan_before = body.get("plan")
    if executor is None and elementwise:
        step.optimizer.state.clear()
        step._pending = Pending(step, reader)
        return extra
    if executor is not None:
        _refresh(step)
    reader.close()
    return extra


def _read(step: Step, reader: FolderReader, wanted: Wanted) -> None:
    collectives = step._collectives
    group, path = collectives.saving_group(), reader.folder.parent

    def read() -> None:
        load_flat(wanted.targets, reader, group, 0, collectives.world == 1, FlatLoadPlanner())

    try:
        with torch.no_grad(), plain_tensor_access():
            collectives.named(read, f"the load from {path}")
            wanted.finish()
    except CheckpointException as failure:
        raise_together(collectives, f"the checkpoint in {path} could not be read", failed_ranks(failure))


def _read_fragments(step: Step, reader: FolderReader) -> None:
    """Optimizer state that is offloaded: one bucket after the other, so that one at a time is in memory."""
    assert step._executor is not None
    for held in step._executor.states:
        if held.fragment is not None:
            wanted = Wanted()
            contents.want_optimizer(held, reader.body, wanted)
            _read(step, reader, wanted)
            held.put_out()


def _refresh(step: Step) -> None:
    """Bring whole parameters up to date where ranks hold them besides their slices."""
    assert step._executor is not None
    for held in step._executor.states:
        held.refresh()
        if held.full is not None and held.bucket.scatter:
            pending = step._collectives.gather(held.full, held.full[held.own], held.bucket.index)
            step._collectives.wait(pending, f"the loaded values of {held.bucket.describe()}")


class Pending:
    """A checkpoint that was loaded into a step without buckets: applied when they are made.

    The user's own tensors hold the parameters already. What waits in the files, which stay open, is the optimizer's
    state, master values that the model's dtype cannot hold, and what is on the meta device.
    """

    def __init__(self, step: Step, reader: FolderReader) -> None:
        self.reader = reader
        self.optimizer_state: dict[str, Any] = reader.body["optimizer"]["state"]
        self.masters = {
            info.index: info.name
            for info, parameter in zip(step._infos, step._parameters, strict=True)
            if info.master != info.dtype or parameter.is_meta
        }
        buffers = zip(step._buffer_names(), step._buffers(), strict=True)
        self.meta_buffers = {name for name, buffer in buffers if buffer.is_meta}

    def apply(self, step: Step) -> None:
        assert step._executor is not None
        wanted = Wanted()
        contents.want_unbuilt(step, wanted, self.masters, self.meta_buffers)
        for held in step._executor.states:
            contents.want_masters(held, wanted, self.masters)
            if self.optimizer_state and held.fragment is None:
                contents.want_optimizer(held, self.reader.body, wanted)
        _read(step, self.reader, wanted)
        if self.optimizer_state:
            _read_fragments(step, self.reader)
        if self.masters:
            _refresh(step)
        self.reader.close()

    def settle(self, step: Step) -> None:
        """The whole optimizer state into the user's optimizer: somebody asks for its state dict."""
        wanted = Wanted()
        whole = contents.whole_optimizer_state(step, self.reader.body, wanted)
        for name, ranges in wanted.targets.items():  # by each rank for itself: one rank alone may ask
            for offset, target in ranges:
                target.copy_(self.reader.read(name, offset, offset + target.numel()))
        step._import_optimizer(whole)
        self.optimizer_state = {}

    def passed_on(self, rank: int, world: int) -> dict[str, Flat]:
        """For a save before the first step: an equal share of everything that waits, from file to file."""
        waiting = [f"parameter/{name}" for name in self.masters.values()]
        for values in self.optimizer_state.values():
            waiting += [data["$tensor"] for data in values.values() if contents.is_tensor(data)]
        return {name: self._share(name, rank, world) for name in waiting if name in self.reader.body["tensors"]}

    def _share(self, name: str, rank: int, world: int) -> Flat:
        entry = self.reader.body["tensors"][name]
        start, stop = entry["size"] * rank // world, entry["size"] * (rank + 1) // world
        part = Part(start, stop - start, lambda: self.reader.read(name, start, stop))
        return Flat(entry["size"], DTYPES[entry["dtype"]], (part,) if start < stop else ())
