"""First values of a model from a safetensors file or a Hugging Face checkpoint folder, any part of a tensor at a time.

`weft.state.materialise` calls this. Names, shapes and files are checked against the model before anything is read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from weft.options import CHECKPOINT_FILES
from weft.state import safetensors
from weft.state.checks import dense_stride
from weft.state.safetensors import Stored

SINGLE, INDEX = CHECKPOINT_FILES
BLOCK = 2**22  # elements read at a time: what is in memory besides the slices


class Pretrained:
    """The tensors of a checkpoint, under the model's names."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path = path
        found = _headers(path)
        persistent = set(model.state_dict(keep_vars=True))
        self.tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        aliases: dict[str, list[str]] = {name: [] for name in self.tensors}
        name_of = {id(tensor): name for name, tensor in self.tensors.items()}
        for getter in (model.named_parameters, model.named_buffers):
            for alias, tensor in getter(remove_duplicate=False):
                if id(tensor) in name_of:
                    aliases[name_of[id(tensor)]].append(alias)
        prefixes = sorted({"model", str(getattr(model, "base_model_prefix", "") or "model")})
        self.stored: dict[str, Stored] = {}
        used: set[str] = set()
        for name, names in aliases.items():
            spellings = [spelling for alias in names for spelling in _spellings(alias, prefixes) if spelling in found]
            used.update(spellings)
            if spellings:
                self.stored[name] = found[spellings[0]]
        self._check(found, used)

    def _check(self, found: Mapping[str, Stored], used: set[str]) -> None:
        missing = [name for name in self.tensors if name not in self.stored]
        wrong = [
            f"{name} is {list(self.tensors[name].shape)} in the model and {list(stored.shape)} in the file"
            for name, stored in self.stored.items()
            if tuple(self.tensors[name].shape) != stored.shape
        ]
        unused = [name for name in found if name not in used]
        if missing or wrong:
            problems = []
            if missing:
                problems.append(f"it lacks {_some(missing)}")
            if wrong:
                problems.append(_some(wrong))
            if missing and unused:
                problems.append(f"and has {_some(unused)}, which the model has not")
            raise ValueError(
                f"init={str(self.path)!r} does not fit the model: {'; '.join(problems)}. Build the model from the "
                "checkpoint's own configuration, or rename the tensors in the file"
            )
        if unused:
            warnings.warn(
                f"init={str(self.path)!r} holds tensors that the model has not: {_some(unused)}", stacklevel=5
            )

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Write a tensor's elements from `start` on, in the order of its memory, into a flat tensor."""
        tensor, stored = self.tensors[name], self.stored[name]
        if dense_stride(tensor) != torch.empty(tensor.shape, device="meta").stride():
            # Files are row by row, and this tensor (a convolution's, channels last) is not: it is read whole.
            whole = torch.empty(stored.numel, dtype=stored.dtype)
            whole.as_strided(tensor.shape, dense_stride(tensor)).copy_(stored.read().view(tensor.shape))
            out.copy_(whole[start : start + out.numel()])
            return
        for low in range(0, out.numel(), BLOCK):
            high = min(low + BLOCK, out.numel())
            out[low:high].copy_(stored.read(start + low, start + high))

    def load_into_real(self) -> None:
        """Values of the tensors that have memory already."""
        for name, tensor in self.tensors.items():
            if not tensor.is_meta:
                flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                self.fill(name, 0, flat)
                with torch.no_grad():
                    tensor.copy_(flat.as_strided(tensor.shape, dense_stride(tensor)))


def _headers(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of all files of a folder."""
    if not path.is_dir():
        return safetensors.header(path)
    if (path / SINGLE).exists():
        return safetensors.header(path / SINGLE)
    try:
        of_name: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path / INDEX} is damaged: {type(error).__name__}: {error}") from error
    found: dict[str, Stored] = {}
    for file in sorted(set(of_name.values())):
        if not (path / file).exists():
            raise ValueError(f"init={str(path)!r}: its index names {file}, which is not there; download it again")
        found.update(safetensors.header(path / file))
    return found


def _spellings(name: str, prefixes: list[str]) -> list[str]:
    """A model with a head and its body alone name the same tensor `model.x` and `x`."""
    names = [name]
    for prefix in prefixes:
        names += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return list(dict.fromkeys(names))


def _some(items: list[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
