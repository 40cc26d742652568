"""The store on disk that keeps what was measured, so that a machine is measured once.

One JSON file per machine: sections ("ops", "links", "roofline", ...) of key -> JSON value. Several processes may save
at once: each merges what it measured into what the file then holds, under a lock, so that none loses another's.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.errors import StoreError

FORMAT = 1
JSON_TYPES = (str, int, float, bool, list, dict, type(None))


def default_folder() -> Path:
    """Where measurements are kept unless the user says otherwise."""
    chosen = os.environ.get("WEFT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft"


def machine_key(device: torch.device) -> dict[str, Any]:
    """What measured times depend on: two processes with equal keys share their measurements."""
    key: dict[str, Any] = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        return key | {"model": torch.cuda.get_device_name(device)}
    if device.type == "cpu":
        return key | {"model": _cpu_model(), "threads": torch.get_num_threads()}
    return key | {"model": device.type}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Store:
    """Measured numbers of one machine, by section and key.

    Attributes:
        path: the file, or None if nothing is kept on disk.
        machine: what the numbers hold for.
        failed: keys of ops that cannot be measured alone; not kept on disk, a later version may be able to.
    """

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.machine = machine_key(device)
        self.path: Path | None = None
        self.failed: set[str] = set()
        self._read_only = False
        self._changed: dict[str, dict[str, Any]] = {}
        self._sections: dict[str, dict[str, Any]] = {}
        if folder is not None:
            text = json.dumps({"format": FORMAT, **self.machine}, sort_keys=True)
            name = f"{device.type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
            self.path = Path(folder) / name
            self._sections = _read(self.path, self.machine)

    @classmethod
    def from_table(cls, path: Path | str) -> Store:
        """A table measured on another machine, to plan for that machine; it is never written."""
        path = Path(path)
        if not path.is_file():
            raise StoreError(f"{path}: there is no such table of measurements. Make one with weft measure")
        store = cls.__new__(cls)
        store.machine, store.path, store.failed = _machine_of(path), path, set()
        store._read_only, store._changed = True, {}
        store._sections = _read(path, None)
        return store

    def get(self, section: str, key: str) -> Any | None:
        return self._sections.get(section, {}).get(key)

    def put(self, section: str, key: str, value: Any) -> None:
        if not isinstance(value, JSON_TYPES):
            raise TypeError(f"{section}/{key}: a {type(value).__name__}; the store keeps plain JSON values")
        self._sections.setdefault(section, {})[key] = value
        self._changed.setdefault(section, {})[key] = value

    def sections(self) -> dict[str, Mapping[str, Any]]:
        """All that is known."""
        return dict(self._sections)

    def save(self) -> None:
        """Merge what is new into the file."""
        if self.path is None or self._read_only or not self._changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
                on_disk = _read(self.path, self.machine)
                for section, values in self._changed.items():
                    on_disk.setdefault(section, {}).update(values)
                self._write(on_disk)
        except OSError as error:
            warnings.warn(
                f"weft cannot keep its measurements in {self.path.parent} ({error.strerror or error}), so it measures "
                "again in every run. Set WEFT_CACHE_DIR to a folder that can be written",
                stacklevel=2,
            )
            self.path = None
            return
        for section, values in on_disk.items():  # what others have measured meanwhile
            self._sections.setdefault(section, {}).update(values)
        self._changed.clear()

    def _write(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        assert self.path is not None
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with open(handle, "w") as file:
                json.dump({"format": FORMAT, "machine": self.machine, **sections}, file, indent=1, sort_keys=True)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise


def _load(path: Path) -> dict[str, Any]:
    """The file's content, checked for what every version of it has."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise StoreError(
            f"{path}: not a table of measurements, or a damaged one ({error}). Delete it; weft measures again"
        ) from None
    if not isinstance(content, dict) or "format" not in content or not isinstance(content.get("machine"), dict):
        raise StoreError(
            f"{path}: not a table of measurements (no format and machine in it). Delete it, or name another"
        )
    if content["format"] != FORMAT:
        raise StoreError(
            f"{path}: measurements of format {content['format']}, and this version of weft reads format {FORMAT}. "
            "Delete it and measure again with weft measure"
        )
    for section, values in content.items():
        if section not in ("format", "machine") and not isinstance(values, dict):
            raise StoreError(
                f"{path}: the section {section} is a {type(values).__name__}, not a mapping. Delete the file; weft "
                "measures again"
            )
    return content


def _machine_of(path: Path) -> dict[str, Any]:
    return _load(path)["machine"]


def _read(path: Path, machine: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """A file's sections; with `machine`, only if they were measured on it."""
    try:
        content = _load(path)
    except FileNotFoundError:
        return {}
    except (PermissionError, NotADirectoryError):
        return {}  # `save` will say so
    if machine is not None and content["machine"] != machine:
        differing = sorted(
            key for key in content["machine"] | machine if content["machine"].get(key) != machine.get(key)
        )
        seen = ", ".join(f"{key} {content['machine'].get(key)!r}, here {machine.get(key)!r}" for key in differing)
        raise StoreError(f"{path}: measured on another machine ({seen}). Delete it and measure again with weft measure")
    return {section: values for section, values in content.items() if section not in ("format", "machine")}
