"""Every argument of `weft.compile`, checked where it enters: an error shows the value seen and what is allowed."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from weft.units import UNITS

Mode = Literal["auto", "replicate", "zero1", "zero2", "zero3"]
MODES = ("auto", "replicate", "zero1", "zero2", "zero3")
SHARDED_MODES = ("zero1", "zero2", "zero3")
CHECKPOINT_FILES = ("model.safetensors", "model.safetensors.index.json")
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a step; None keeps the model's own.

    Attributes:
        compute: in which parameters are gathered and forward and backward run.
        reduce: in which gradients are staged and summed over ranks (None: the compute dtype).
        master: of the values that the optimizer updates, and of its state.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "master"):
            value = getattr(self, name)
            if value is torch.float16:
                raise ValueError(
                    f"Precision({name}=torch.float16): fp16 needs loss scaling, which weft does not have; use "
                    "torch.bfloat16 or torch.float32"
                )
            if value is not None and value not in FLOATS:
                raise ValueError(f"Precision({name}={value!r}): use one of {', '.join(map(str, FLOATS))} or None")


# Passes that can be switched off by name, and the options of those that have some.
PASSES: dict[str, tuple[str, ...]] = {
    "shard": ("bucket_bytes",),
    "stage_in_place": (),
    "prefetch": ("rule",),
    "unshard": (),
    "offload": ("fragments", "window", "overlap"),
    "replan": (),
}
RULES = ("hidden", "earliest")  # of prefetch


@dataclass(frozen=True)
class Options:
    """The checked arguments."""

    mode: Mode
    memory: int | float
    memory_given: bool
    accumulate: int
    clip_norm: float | None
    precision: Precision
    passes: Mapping[str, Any]
    seed: int | None
    mesh: Any
    timeout: timedelta
    debug: bool
    init: Callable[[torch.nn.Module], Any] | Path | None = None
    cache_dir: Path | None = None
    plan: Path | None = None
    offload: Literal["auto", "off"] | Path = "auto"  # a folder: where offloaded state goes

    def enabled(self, name: str) -> bool:
        configured = self.passes.get(name, True)
        if name == "offload" and isinstance(configured, Mapping):
            return bool(configured.get("overlap", True))
        return configured is not False

    @property
    def fragments(self) -> Literal["all"] | Sequence[int]:
        """The buckets whose optimizer state is to be offloaded."""
        configured = self.passes.get("offload")
        return configured.get("fragments", ()) if isinstance(configured, Mapping) else ()

    @property
    def offload_window(self) -> int:
        configured = self.passes.get("offload")
        return configured.get("window", 2) if isinstance(configured, Mapping) else 2

    @property
    def prefetch_rule(self) -> str:
        configured = self.passes.get("prefetch")
        return str(configured.get("rule", RULES[0])) if isinstance(configured, Mapping) else RULES[0]

    def bucket_bytes(self, device: torch.device) -> int:
        configured = self.passes.get("shard")
        if isinstance(configured, Mapping) and "bucket_bytes" in configured:
            return int(configured["bucket_bytes"])
        # On ordinary networks 1 to 4 MB reach the wire's rate; NVLink and InfiniBand want larger messages.
        return 4 * 2**20 if device.type == "cpu" else 32 * 2**20


def check_options(
    *,
    mode: Any,
    memory: Any,
    accumulate: Any,
    clip_norm: Any,
    precision: Any,
    fuse: Any,
    offload: Any,
    passes: Any,
    seed: Any,
    cache_dir: Any,
    mesh: Any,
    timeout: Any,
    debug: Any,
    init: Any = None,
    plan: Any = None,
) -> Options:
    """Turn what the user wrote into Options, or say what is wrong with it."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, MODES))}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: a whole number of micro-batches a step, at least 1")
    if clip_norm is not None and (
        isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0
    ):
        raise ValueError(
            f"clip_norm={clip_norm!r}: a positive number, float('inf') to measure the norm without clipping, or None"
        )
    if precision is not None and not isinstance(precision, Precision):
        raise ValueError(
            f"precision={precision!r}: weft.Precision(compute=..., reduce=..., master=...) or None, for instance "
            "weft.Precision(compute=torch.bfloat16)"
        )
    if fuse not in ("auto", "off"):
        raise ValueError(f"fuse={fuse!r}: use 'auto' or 'off' (both run every op as PyTorch has it in this version)")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ValueError(f"seed={seed!r}: a whole number from 0 to 2**63 - 1, or None for torch.initial_seed()")
    if not isinstance(debug, bool):
        raise ValueError(f"debug={debug!r}: True or False")
    return Options(
        mode=mode,
        memory=check_memory(memory),
        memory_given=memory is not None,
        accumulate=accumulate,
        clip_norm=None if clip_norm is None else float(clip_norm),
        precision=precision or Precision(),
        passes=_check_passes(passes),
        seed=seed,
        mesh=_check_mesh(mesh),
        timeout=_check_timeout(timeout),
        debug=debug,
        init=_check_init(init),
        cache_dir=_check_folder(cache_dir),
        plan=_check_plan(plan),
        offload=_check_offload(offload, passes),
    )


def check_memory(memory: Any) -> int | float:
    """Bytes as an int, or a fraction of the device as a float."""
    allowed = "bytes as an int, a string like '14GiB', a fraction of the device like 0.9, or None"
    if memory is None:
        return 0.9
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory)
        if match is None or match[2] not in UNITS:
            raise ValueError(f"memory={memory!r}: {allowed}; units are {', '.join(UNITS)}")
        memory = int(float(match[1]) * UNITS[match[2]])
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not math.isfinite(memory):
        raise ValueError(f"memory={memory!r}: {allowed}")
    if isinstance(memory, float) and not 0 < memory < 1:
        raise ValueError(f"memory={memory!r}: a float is a fraction of the device, above 0 and below 1; {allowed}")
    if isinstance(memory, int) and memory < 1:
        raise ValueError(f"memory={memory!r}: {allowed}")
    return memory


def _check_passes(passes: Any) -> Mapping[str, Any]:
    if passes is None:
        return {}
    if not isinstance(passes, Mapping):
        raise ValueError(f"passes={passes!r}: a dict from a pass's name to True, False or a dict of its options")
    for name, value in passes.items():
        if name not in PASSES:
            raise ValueError(f"passes={{{name!r}: ...}}: there is no such pass; the passes are {', '.join(PASSES)}")
        if isinstance(value, Mapping):
            unknown = set(value) - set(PASSES[name])
            if unknown:
                known = ", ".join(PASSES[name]) or "none"
                raise ValueError(f"passes={{{name!r}: {dict(value)!r}}}: the options of {name} are: {known}")
            rule = value.get("rule", RULES[0])
            if rule not in RULES:
                raise ValueError(f"passes={{{name!r}: {{'rule': {rule!r}}}}}: use one of {', '.join(map(repr, RULES))}")
            size = value.get("bucket_bytes", 1)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"passes={{'shard': {{'bucket_bytes': {size!r}}}}}: a positive number of bytes")
            if name == "offload":
                _check_fragments(value)
        elif not isinstance(value, bool):
            raise ValueError(f"passes={{{name!r}: {value!r}}}: use True, False or a dict of options")
        elif name == "shard" and value is False:
            raise ValueError("passes={'shard': False}: the base schedule cannot be switched off")
    return dict(passes)


def _check_fragments(value: Mapping[str, Any]) -> None:
    fragments, window, overlap = value.get("fragments", ()), value.get("window", 1), value.get("overlap", True)
    indices = isinstance(fragments, (list, tuple)) and all(type(index) is int and index >= 0 for index in fragments)
    if fragments != "all" and not (indices and len(set(fragments)) == len(fragments)):
        raise ValueError(
            f"passes={{'offload': {{'fragments': {fragments!r}}}}}: 'all', or the indices of some buckets, each once"
        )
    if type(window) is not int or window < 1:
        raise ValueError(
            f"passes={{'offload': {{'window': {window!r}}}}}: how many fragments are in memory at a time, at least 1"
        )
    if not isinstance(overlap, bool):
        raise ValueError(f"passes={{'offload': {{'overlap': {overlap!r}}}}}: True or False")


def _check_offload(offload: Any, passes: Any) -> Literal["auto", "off"] | Path:
    allowed = "use 'auto', 'off' or a folder, an existing one, for optimizer state that does not fit in memory"
    if isinstance(offload, str) and offload in ("auto", "off"):
        configured = passes.get("offload") if isinstance(passes, Mapping) else None
        if offload == "off" and isinstance(configured, Mapping) and configured.get("fragments"):
            raise ValueError(
                f"offload='off' and passes={{'offload': {dict(configured)!r}}}: the one keeps all state in memory and "
                "the other does not; leave one of them out"
            )
        return offload  # type: ignore[return-value]
    if not isinstance(offload, (str, os.PathLike)) or not os.fspath(offload):
        raise ValueError(f"offload={offload!r}: {allowed}")
    path = Path(offload)
    if not path.is_dir():
        seen = "this is a file" if path.exists() else "there is no such folder"
        raise ValueError(f"offload={offload!r}: {seen}; {allowed}")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"offload={offload!r}: it cannot be written to ({error.strerror}); {allowed}") from error
    return path


def _check_mesh(mesh: Any) -> Any:
    if mesh is None:
        return None
    dimensions = getattr(mesh, "ndim", None)
    if dimensions is None or not hasattr(mesh, "get_group"):
        raise ValueError(f"mesh={mesh!r}: a torch.distributed DeviceMesh of one dimension, or None for all ranks")
    if dimensions != 1:
        raise ValueError(
            f"mesh has {dimensions} dimensions {getattr(mesh, 'mesh_dim_names', None) or ''}: weft takes one; pass a "
            "slice of it, for instance mesh['dp']"
        )
    return mesh


def _check_timeout(timeout: Any) -> timedelta:
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        seconds = -1.0
    if not 0 < seconds < 10**7:
        raise ValueError(f"timeout={timeout!r}: a positive number of seconds or a datetime.timedelta")
    return timedelta(seconds=seconds)


def _check_init(init: Any) -> Callable[[torch.nn.Module], Any] | Path | None:
    allowed = (
        "a function that takes a module and initialises its own tensors in place, a .safetensors file, a folder with "
        "model.safetensors or model.safetensors.index.json, or None"
    )
    if isinstance(init, (str, os.PathLike)):
        path = Path(init)
        files = [path] if path.suffix == ".safetensors" else [path / n for n in CHECKPOINT_FILES]
        if not any(file.is_file() for file in files):
            raise ValueError(f"init={str(init)!r}: {_what_is_there(path)}; use {allowed}")
        return path
    if init is not None and (not callable(init) or isinstance(init, (type, torch.nn.Module))):
        raise ValueError(f"init is a {type(init).__name__} ({str(init)[:60]}): use {allowed}")
    return init


def _check_folder(cache_dir: Any) -> Path | None:
    if cache_dir is None:
        return None
    if not isinstance(cache_dir, (str, os.PathLike)) or Path(cache_dir).is_file():
        raise ValueError(
            f"cache_dir={cache_dir!r}: a folder for measurements and plans (it is made if it is not there), or None "
            "for $WEFT_CACHE_DIR or ~/.cache/weft"
        )
    return Path(cache_dir)


def _check_plan(plan: Any) -> Path | None:
    if plan is None:
        return None
    if not isinstance(plan, (str, os.PathLike)) or not Path(plan).is_file():
        raise ValueError(f"plan={plan!r}: a file that step.plan.save(path) wrote, or None to plan anew")
    return Path(plan)


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return f"the folder holds {', '.join(names[:6]) or 'nothing'}{', ...' if len(names) > 6 else ''}"
    return "there is no such file or folder" if not path.exists() else "this is a file of another kind"


def budget_bytes(memory: int | float, device: torch.device) -> int:
    """The user's budget in bytes; a fraction is of this rank's share of the device."""
    if isinstance(memory, int):
        return memory
    if device.type == "cpu":
        share = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        return int(memory * host_memory() / share)
    _, total = torch.get_device_module(device).mem_get_info(device)
    return int(memory * total)


def host_memory() -> int:
    """The memory this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such controller, or "max"
    return total
