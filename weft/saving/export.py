"""`weft.export`: whole weights in safetensors files, as `transformers` and others read them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.saving.save import agree, wait_for_latest
from weft.state import safetensors
from weft.state.safetensors import DTYPES

if TYPE_CHECKING:
    from weft.api import Step

LARGEST_FILE = 5 * 10**9  # bytes


@dataclass(frozen=True)
class Entry:
    """One tensor of the export, in the order in which they come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def export(step: Step, folder: str | os.PathLike[str], largest_file: int = LARGEST_FILE) -> None:
    """Write the model's weights under the names and in the dtypes that the model gives them; all ranks must call it.

    Rank 0 writes bucket by bucket, so that no rank holds the whole model. A tied parameter is written once. Above
    `largest_file` bytes there are several files and a `model.safetensors.index.json`; a model with a `config` of
    `transformers` gets that too, so that `from_pretrained(folder)` loads the folder.
    """
    step._check_usable()
    wait_for_latest()
    step.drain()
    folder = Path(folder)
    plan = _plan(step)
    values = _values(step)
    problem = None
    if step._collectives.rank == 0:
        try:
            _write(step, folder, plan, values, largest_file)
        except Exception as error:  # the other ranks must hear of it, whatever it is
            problem = f"{type(error).__name__}: {error}"
    for _ in values:  # the other ranks' part; on rank 0 what a failed write left, so that nobody waits for it
        pass
    agree(step._collectives, f"the export to {folder} failed", problem)


def _plan(step: Step) -> list[Entry]:
    names = _public_names(step.model)
    entries = [
        Entry(names[info.index], info.dtype, info.shape) for info in (step._infos[index] for index in _order(step))
    ]
    return entries + [Entry(name, value.dtype, tuple(value.shape)) for name, value in _buffers(step)]


def _order(step: Step) -> list[int]:
    """Parameters in the order in which their values come: bucket by bucket, then those outside."""
    states = [] if step._executor is None else step._executor.states
    inside = dict.fromkeys(slot.parameter for state in states for slot in state.bucket.slots)
    return [*inside, *(index for index in range(len(step._infos)) if index not in inside)]


def _values(step: Step) -> Iterator[torch.Tensor]:
    """The same tensors' values; every rank must go through all of it, since gathers are in between."""
    states = [] if step._executor is None else step._executor.states
    inside = 0
    for state in states:
        whole = step._gather_master(state)
        for slot in state.bucket.slots:
            yield slot.view(whole).to(step._infos[slot.parameter].dtype)
            inside += 1
        del whole
    for index in _order(step)[inside:]:
        yield step._parameters[index].detach()
    for _, value in _buffers(step):
        yield value.detach()


def _buffers(step: Step) -> list[tuple[str, torch.Tensor]]:
    """Those that belong to the model's state dict."""
    return [
        (name, module._buffers[attribute])  # type: ignore[misc]
        for name, module, attribute in step._buffer_slots
        if attribute not in module._non_persistent_buffers_set
    ]


def _public_names(model: Any) -> list[str]:
    """One name a parameter. Where several modules share it: the one that `transformers` does not tie to another."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return [next((name for name in aliases if name not in tied), aliases[0]) for aliases in names.values()]


def _write(step: Step, folder: Path, plan: list[Entry], values: Iterator[torch.Tensor], largest_file: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[Entry]] = [[]]
    for entry in plan:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > largest_file:
            files.append([])
        files[-1].append(entry)
    names = [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    written = [folder / f"{name}.new" for name in names]
    try:
        for path, entries in zip(written, files, strict=True):
            unknown = [entry for entry in entries if entry.dtype not in DTYPES.values()]
            if unknown:
                raise KeyError(f"{unknown[0].name} is of {unknown[0].dtype}, which safetensors files cannot hold")
            described = {entry.name: (entry.dtype, entry.shape) for entry in entries}
            # zip asks the first iterable first: it must be the entries, or a value would be lost between two files
            taken = (value for _, value in zip(entries, values, strict=False))
            safetensors.write(path, described, taken, {"format": "pt"})
        for path, name in zip(written, names, strict=True):
            os.replace(path, folder / name)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    stale = {path for path in folder.glob("model*.safetensors*") if path.name not in names}
    for path in stale:  # of an earlier export, whose index would be believed
        path.unlink()
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in plan)},
            "weight_map": {e.name: name for name, entries in zip(names, files, strict=True) for e in entries},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    _write_configs(step.model, folder)


def _write_configs(model: Any, folder: Path) -> None:
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    if hasattr(getattr(model, "generation_config", None), "save_pretrained"):
        model.generation_config.save_pretrained(folder)
