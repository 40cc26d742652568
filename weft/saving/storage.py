"""A checkpoint on disk: a folder with a small pointer file and one data folder, replaced as a whole.

    path/checkpoint.json          what the checkpoint holds, and in which files: the pointer
    path/data-<step>-<id>/        one safetensors file a rank

A save writes a data folder of its own, brings it to the disk, and then replaces the pointer: until that moment the old
checkpoint is the checkpoint, afterwards the new one is, and no reader ever sees a mixture. Data folders that the
pointer does not name are left-overs of interrupted saves. The JSON carries a checksum of itself and one for every block
of every file, and each block is checked whenever some of it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.errors import CheckpointError
from weft.saving.values import NAMES
from weft.state import safetensors

POINTER = "checkpoint.json"
FORMAT = 1
BLOCK = 4 << 20  # bytes that one checksum covers: what is read at least
PIECE = 4 << 20  # elements that are read at a time, on their way to where they belong

# ---- writing ----


@dataclass(frozen=True)
class DataFile:
    """A file of the data folder as it was written."""

    name: str
    size: int
    checksums: tuple[int, ...]  # CRC-32 of each block


@dataclass(frozen=True)
class Place:
    """Where a chunk of a tensor is."""

    file: DataFile
    start: int  # in bytes


class _Checksummed:
    """A file that remembers the checksum of every block written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, 0
        self.checksums: list[int] = []

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            filled = self.size % BLOCK
            part, view = view[: BLOCK - filled], view[BLOCK - filled :]
            self.file.write(part)
            if filled:
                self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            else:
                self.checksums.append(zlib.crc32(part))
            self.size += len(part)


class FolderWriter(StorageWriter):
    """One save: `name` is its data folder."""

    def __init__(self, path: Path, name: str, rank: int) -> None:
        self.path, self.folder, self.rank = path, path / name, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            with _naming(self.folder):
                self.path.mkdir(parents=True, exist_ok=True)
                sweep(self.path)
                self.folder.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        file = self.folder / f"rank-{self.rank:05d}.safetensors"
        with _naming(file):
            if plan.items:
                results = self._write(file, plan, planner)
            _sync_folder(self.folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, path: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        entries = {}
        for item in plan.items:
            assert item.tensor_data is not None
            assert item.index.offset is not None
            dtype, length = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes[0]
            entries[f"{item.index.fqn}:{item.index.offset[0]}"] = (dtype, (length,))

        def values() -> Iterator[torch.Tensor]:
            for item in plan.items:
                value = planner.resolve_data(item)
                assert isinstance(value, torch.Tensor)
                yield value

        with open(path, "xb") as raw:
            file = _Checksummed(raw)
            starts = safetensors.write_to(file, entries, values())
            raw.flush()
            os.fsync(raw.fileno())
        record = DataFile(path.name, file.size, tuple(file.checksums))
        return [
            WriteResult(item.index, dtype.itemsize * length, Place(record, start))
            for item, (dtype, (length,)), start in zip(plan.items, entries.values(), starts.values(), strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the new data folder the checkpoint: rank 0 does, when every rank's file is on the disk."""
        places = {result.index: result.storage_data for answer in results for result in answer}
        files = {place.file.name: place.file for place in places.values()}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {"dtype": NAMES[entry.properties.dtype], "size": entry.size[0], "chunks": []}
        for index, place in places.items():
            assert index.offset is not None
            tensors[index.fqn]["chunks"].append([index.offset[0], place.file.name, place.start])
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            lengths = {chunk.offsets[0]: chunk.sizes[0] for chunk in entry.chunks}
            chunks = tensors[name]["chunks"]
            tensors[name]["chunks"] = sorted([offset, lengths[offset], *where] for offset, *where in chunks)
        body = {
            **metadata.planner_data,
            "format": FORMAT,
            "folder": self.folder.name,
            "block": BLOCK,
            "files": {f.name: {"size": f.size, "crc32": list(f.checksums)} for f in files.values()},
            "tensors": tensors,
        }
        with _naming(self.path / POINTER):
            _replace_pointer(self.path, {"sha256": _digest(body), **body})
        sweep(self.path)


def _replace_pointer(path: Path, body: Mapping[str, Any]) -> None:
    # The data folder's own name must be on the disk before the pointer names it.
    _sync_folder(path)
    new = path / f"{POINTER}.new"
    with open(new, "w", encoding="utf-8") as file:
        json.dump(body, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path / POINTER)
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file an error of the operating system is about: a full disk does not."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def sweep(path: Path) -> None:
    """Remove what interrupted saves left, and checkpoints that were replaced; never what the pointer names."""
    try:
        kept = read_pointer(path)["folder"] if (path / POINTER).exists() else None
    except (CheckpointError, OSError):
        return  # a damaged pointer may still be mended by hand: touch nothing
    (path / f"{POINTER}.new").unlink(missing_ok=True)
    for folder in path.glob("data-*"):
        if folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)


# ---- reading ----


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_pointer(path: Path) -> dict[str, Any]:
    """The checked contents of checkpoint.json."""
    pointer = path / POINTER
    try:
        text = pointer.read_text(encoding="utf-8")
    except FileNotFoundError:
        seen = "there is no such folder" if not path.exists() else "the folder has no " + POINTER
        raise CheckpointError(f"no checkpoint in {path}: {seen}. Give the path that weft.save was given") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {pointer}: {error}") from error
    try:
        body = json.loads(text)
        expected = body.pop("sha256")
        version, digest = body["format"], _digest(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{pointer} is damaged ({type(error).__name__}: {error}): restore it from a copy, or load "
            "another checkpoint"
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"{pointer} is of format {version}; this version of weft reads format {FORMAT}")
    if digest != expected:
        raise CheckpointError(
            f"{pointer} was changed since it was written (sha256 {digest[:12]}..., recorded {expected[:12]}...): "
            "restore it from a copy, or load another checkpoint"
        )
    return body


class _Blocks:
    """A data file that is read in whole blocks, each checked against its checksum."""

    def __init__(self, path: Path, checksums: list[int], block: int) -> None:
        self.path, self.checksums, self.size = path, checksums, block
        self.file = open(path, "rb")  # noqa: SIM115  (kept open: the file may be read after a later save removed it)

    def block(self, index: int) -> bytes:
        self.file.seek(index * self.size)
        data = self.file.read(self.size)
        found = zlib.crc32(data)
        if found != self.checksums[index]:
            raise CheckpointError(
                f"{self.path} is damaged between bytes {index * self.size} and {(index + 1) * self.size}: CRC-32 "
                f"{found:08x}, recorded {self.checksums[index]:08x}. Restore it from a copy, or load another checkpoint"
            )
        return data


class FolderReader(StorageReader):
    """The data files of a checkpoint whose JSON was read."""

    def __init__(self, path: Path, body: Mapping[str, Any]) -> None:
        self.folder, self.body = path / body["folder"], body
        self.files: dict[str, _Blocks] = {}
        self.last: tuple[tuple[str, int], bytes] = (("", -1), b"")  # the block read last, and which it is

    def open(self) -> None:
        """Open every file, and check that it is as long as it was."""
        for name, record in self.body["files"].items():
            path = self.folder / name
            try:
                blocks = _Blocks(path, record["crc32"], self.body["block"])
                size = os.fstat(blocks.file.fileno()).st_size
            except OSError as error:
                raise CheckpointError(
                    f"cannot read {path}, a file of this checkpoint: {error.strerror}. All ranks must see the folder "
                    "that all ranks wrote to"
                ) from error
            if size != record["size"]:
                raise CheckpointError(
                    f"{path} has {size} bytes, and {record['size']} were written: restore it from a copy, or load "
                    "another checkpoint"
                )
            self.files[name] = blocks

    def close(self) -> None:
        for blocks in self.files.values():
            blocks.file.close()

    def __del__(self) -> None:
        self.close()

    def verify(self, rank: int, world: int) -> None:
        """Check this rank's share of all blocks, so that all ranks together have checked everything."""
        blocks = [(file, index) for file in self.files.values() for index in range(len(file.checksums))]
        for file, index in blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world]:
            file.block(index)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A range of a flat tensor, whichever files it lies in."""
        entry = self.body["tensors"][name]
        dtype = safetensors.DTYPES[entry["dtype"]]
        values = torch.empty(stop - start, dtype=dtype)
        for offset, length, file, position in entry["chunks"]:
            first, last = max(start, offset), min(stop, offset + length)
            if first < last:
                self._fill(values[first - start : last - start], file, position + (first - offset) * dtype.itemsize)
        return values

    def _fill(self, values: torch.Tensor, file: str, position: int) -> None:
        out, done = values.view(torch.uint8).numpy().data, 0
        while done < len(out):
            index, inside = divmod(position + done, self.body["block"])
            if self.last[0] != (file, index):
                self.last = (file, index), self.files[file].block(index)
            part = memoryview(self.last[1])[inside : inside + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    # ---- what torch.distributed.checkpoint calls ----

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        def chunk(offset: int, length: int) -> ChunkStorageMetadata:
            return ChunkStorageMetadata(torch.Size((offset,)), torch.Size((length,)))

        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=safetensors.DTYPES[entry["dtype"]]),
                    torch.Size((entry["size"],)),
                    [chunk(offset, length) for offset, length, _, _ in entry["chunks"]],
                )
                for name, entry in self.body["tensors"].items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reads: list[tuple[str, int, torch.dtype, torch.Tensor]] = []
        for item in plan.items:
            entry = self.body["tensors"][item.storage_index.fqn]
            assert item.storage_index.index is not None
            _, _, file, position = entry["chunks"][item.storage_index.index]
            dtype = safetensors.DTYPES[entry["dtype"]]
            position += item.storage_offsets[0] * dtype.itemsize
            reads.append((file, position, dtype, planner.resolve_tensor(item)))
        for file, position, dtype, target in sorted(reads, key=lambda read: read[:2]):  # so each block is read once
            for start, part in enumerate(target.split(PIECE)):
                values = torch.empty(part.numel(), dtype=dtype)
                self._fill(values, file, position + start * PIECE * dtype.itemsize)
                part.copy_(values)
        done: Future[None] = Future()
        done.set_result(None)
        return done
