"""What a compiled step holds, as flat tensors and a description in JSON; and the way back, in any layout.

Parameters (their master values) and elementwise optimizer state are flat tensors, of which every rank writes and reads
what it owns. What every rank has (buffers, whole-tensor optimizers) is rank 0's. What is small is in the description.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import weft
from weft.saving.planner import Flat, Part, Targets
from weft.saving.values import NAMES, decode, encode, flat_view
from weft.state.checks import dense_stride
from weft.state.layout import ParameterInfo, Slot
from weft.state.optimizer import group_options
from weft.state.safetensors import DTYPES
from weft.state.shards import BucketState

if TYPE_CHECKING:
    from weft.api import Step

# ---- saving ----


def collect(step: Step, extra: Any) -> tuple[dict[str, Any], dict[str, Flat]]:
    """This rank's part of a checkpoint: the description, and the flat tensors with the parts that it writes."""
    loose: dict[str, torch.Tensor] = {}  # whole tensors that rank 0 writes
    rank, world = step._collectives.rank, step._collectives.world
    names = [info.name for info in step._infos]
    name_of = {id(parameter): name for parameter, name in zip(step._parameters, names, strict=True)}
    facts: dict[str, Any] = {
        "versions": {"weft": weft.__version__, "torch": torch.__version__},
        "mode": step._mode,
        "world": world,
        "plan": None if step._planned is None or world == 1 else step._planned.decisions.to_json(),
        "steps": step.steps,
        "device": step._device.type,
        "extra": encode(extra, "extra", loose),
        "parameters": {i.name: _shape(i.shape, i.stride) for i in step._infos},
        "buffers": {
            name: _shape(buffer.shape, dense_stride(buffer))
            for name, buffer in zip(step._buffer_names(), step._buffers(), strict=True)
        },
        "optimizer": {
            "class": type(step.optimizer).__name__,
            "groups": [
                {
                    "options": encode(group_options(group), f"group/{index}", loose),
                    "parameters": [name_of[id(parameter)] for parameter in group["params"]],
                }
                for index, group in enumerate(step.optimizer.param_groups)
            ],
            "state": {},
        },
    }
    flats: dict[str, Flat] = {}
    state: dict[str, Any] = facts["optimizer"]["state"]
    pending = step._pending
    in_buckets: set[int] = set()
    if step._executor is not None:
        for bucket_state in step._executor.states:
            in_buckets.update(slot.parameter for slot in bucket_state.bucket.slots)
            _collect_bucket(bucket_state, rank, flats, state)
    if pending is not None:
        state.update(pending.optimizer_state)
        flats.update(pending.passed_on(rank, world))
    if step._executor is None or not step._probe.elementwise:
        for index, values in step._optimizer_states().items():  # type: ignore[union-attr]  # it is a dict here
            state[names[index]] = encode(values, f"optimizer/{names[index]}", loose)
    for index, parameter in enumerate(step._parameters):
        if index not in in_buckets and f"parameter/{names[index]}" not in flats:
            loose[f"parameter/{names[index]}"] = flat_view(parameter.detach())
    for name, buffer in zip(step._buffer_names(), step._buffers(), strict=True):
        loose[f"buffer/{name}"] = flat_view(buffer.detach())
    unknown = next((f"{k} is of {v.dtype}" for k, v in loose.items() if v.dtype not in NAMES), None)
    if unknown:
        raise TypeError(f"{unknown}; a checkpoint keeps {', '.join(map(str, NAMES))}")
    for name, values in loose.items():
        if values.numel():
            parts = (Part(0, values.numel(), values),) if rank == 0 else ()
            flats[name] = Flat(values.numel(), values.dtype, parts)
    random = random_state(step)
    flats[f"random/{rank}"] = Flat(random.numel(), random.dtype, (Part(0, random.numel(), random),))
    return facts if rank == 0 else {"optimizer": {"state": state}}, flats


def random_state(step: Step) -> torch.Tensor:
    return step._random_state if step._executor is None else step._executor.random_state


def _shape(shape: Iterable[int], stride: Iterable[int]) -> dict[str, list[int]]:
    return {"shape": list(shape), "stride": list(stride)}


def _collect_bucket(held: BucketState, rank: int, flats: dict[str, Flat], state: dict[str, Any]) -> None:
    """What this rank writes of a bucket: its slice, also where every rank has all of it."""
    pieces = {} if held.optimizer is None else held.optimizer.export_state()
    for slot, start, stop in overlaps(held, held.bucket.slice(rank)):
        here = start - held.own.start
        values = held.master[here : here + stop - start]
        flats[f"parameter/{slot.name}"] = _one_part(slot, start, values)
        if not pieces.get(slot.parameter):
            continue
        known = state.setdefault(slot.name, {})
        for key, value in pieces[slot.parameter].items():
            name = f"optimizer/{slot.name}/{key}"
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                begin = max(slot.offset, held.own.start)  # a piece is of all that this rank holds
                flats[name] = _state_part(held, slot, start, value[start - begin : stop - begin], key)
                known[key] = {"$tensor": name, "dtype": NAMES[value.dtype], **_shape(slot.shape, slot.stride)}
            else:
                known[key] = encode(value, name, {})


def overlaps(held: BucketState, owned: slice) -> Iterator[tuple[Slot, int, int]]:
    """The parameters with elements in a range of a bucket: (slot, start, stop) in elements of the bucket."""
    for slot in held.bucket.slots:
        start, stop = max(slot.offset, owned.start), min(slot.end, owned.stop)
        if start < stop:
            yield slot, start, stop


def _state_part(held: BucketState, slot: Slot, start: int, values: torch.Tensor, key: str) -> Flat:
    """Of a state that is offloaded the values are brought into memory when they are written, a fragment at a time."""
    if held.fragment is None:
        return _one_part(slot, start, values)
    here = start - max(slot.offset, held.own.start)
    later = held.fragment.later(slot.parameter, key, here, here + values.numel())
    return Flat(slot.numel, values.dtype, (Part(start - slot.offset, values.numel(), later),))


def _one_part(slot: Slot, start: int, values: torch.Tensor) -> Flat:
    return Flat(slot.numel, values.dtype, (Part(start - slot.offset, values.numel(), values),))


# ---- loading ----


def mismatches(step: Step, body: Mapping[str, Any]) -> list[str]:
    """Why a checkpoint does not fit this step; nothing is changed."""
    found: list[str] = []
    parameters = {info.name: _shape(info.shape, info.stride) for info in step._infos}
    buffers = {
        name: _shape(buffer.shape, dense_stride(buffer))
        for name, buffer in zip(step._buffer_names(), step._buffers(), strict=True)
    }
    for kind, mine, saved in (("parameter", parameters, body["parameters"]), ("buffer", buffers, body["buffers"])):
        found += _names(f"the model lacks these {kind}s of the checkpoint", saved.keys() - mine.keys())
        found += _names(f"the checkpoint lacks these {kind}s of the model", mine.keys() - saved.keys())
        common = [name for name in mine if name in saved]
        other = [n for n in common if mine[n]["shape"] != saved[n]["shape"]]
        shapes = [f"{n} {saved[n]['shape']} in the checkpoint and {mine[n]['shape']} in the model" for n in other]
        found += _names(f"{kind}s of other shapes", shapes)
        strides = [
            f"{n} {saved[n]['stride']} in the checkpoint and {mine[n]['stride']} in the model"
            for n in common
            if n not in other and _order(saved[n]) != _order(mine[n])
        ]
        found += _names(
            f"{kind}s whose elements lie in another order (give the model the memory format that it was saved with, "
            "before weft.compile), by strides",
            strides,
        )
    return found + _optimizer_mismatches(step, body["optimizer"], parameters)


def _optimizer_mismatches(step: Step, saved: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    kind, groups = type(step.optimizer).__name__, step.optimizer.param_groups
    if saved["class"] != kind:
        return [f"the checkpoint is of {saved['class']}, and the step's optimizer is {kind}"]
    if len(saved["groups"]) != len(groups):
        return [f"the checkpoint has {len(saved['groups'])} parameter groups, and the optimizer {len(groups)}"]
    found = []
    name_of = {id(parameter): info.name for parameter, info in zip(step._parameters, step._infos, strict=True)}
    for index, (theirs, group) in enumerate(zip(saved["groups"], groups, strict=True)):
        mine = {name_of[id(parameter)] for parameter in group["params"]}
        moved = mine ^ set(theirs["parameters"])
        found += _names(f"parameters that are in group {index} of the checkpoint or of the optimizer, not both", moved)
    if not step._probe.elementwise:
        return found
    for name, state in saved["state"].items():
        for key, value in state.items():
            if name in parameters and is_tensor(value) and _order(value) != _order(parameters[name]):
                found.append(f"the optimizer's {key} of {name} has another shape or order of elements than it")
    return found


def _order(entry: Mapping[str, list[int]]) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return [stride for size, stride in zip(entry["shape"], entry["stride"], strict=True) if size != 1]


def _names(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"{what}: {', '.join(names[:5])}{more}"] if names else []


class Wanted:
    """Ranges of flat tensors to be read, and what is to be done with them afterwards."""

    def __init__(self) -> None:
        self.targets: Targets = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def into(self, name: str, offset: int, target: torch.Tensor) -> None:
        if target.numel():
            self.targets.setdefault(name, []).append((offset, target))

    def whole(self, entry: Mapping[str, Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of its own that a description refers to; its values come with the reading."""
        tensor = torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype or DTYPES[entry["dtype"]])
        self.into(entry["$tensor"], 0, tensor.as_strided((tensor.numel(),), (1,)))
        return tensor

    def over(self, name: str, tensor: torch.Tensor) -> None:
        """The user's own tensor, which keeps its memory."""
        stride = dense_stride(tensor)
        if tensor.stride() == stride:
            self.into(name, 0, tensor.as_strided((tensor.numel(),), (1,)))
            return
        values = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
        self.into(name, 0, values.as_strided((values.numel(),), (1,)))
        self.copies.append((tensor, values))

    def finish(self) -> None:
        for tensor, values in self.copies:
            tensor.copy_(values)


def want_common(step: Step, body: Mapping[str, Any], wanted: Wanted) -> Any:
    """Everything but what lies in buckets: buffers, parameters outside, random state; returns the user's extra."""
    for name, buffer in zip(step._buffer_names(), step._buffers(), strict=True):
        if not buffer.is_meta:
            wanted.over(f"buffer/{name}", buffer.detach())
    in_buckets = step._layout.slot_of if step._executor is not None and step._layout is not None else {}
    for index, parameter in enumerate(step._parameters):
        if index not in in_buckets and not parameter.is_meta:
            wanted.over(f"parameter/{step._infos[index].name}", parameter.detach())
    return decode(body["extra"], wanted.whole)


def want_unbuilt(step: Step, wanted: Wanted, parameters: Container[int], buffers: Container[str]) -> None:
    """Whole tensors that were on the meta device when the rest was read."""
    assert step._layout is not None
    for index, parameter in enumerate(step._parameters):
        if index in parameters and index not in step._layout.slot_of:
            wanted.over(f"parameter/{step._infos[index].name}", parameter.detach())
    for name, buffer in zip(step._buffer_names(), step._buffers(), strict=True):
        if name in buffers:
            wanted.over(f"buffer/{name}", buffer.detach())


def want_masters(held: BucketState, wanted: Wanted, parameters: Container[int]) -> None:
    """What this rank owns of a bucket's master values, of some parameters."""
    for slot, start, stop in overlaps(held, held.own):
        if slot.parameter in parameters:
            here = start - held.own.start
            wanted.into(f"parameter/{slot.name}", start - slot.offset, held.master[here : here + stop - start])


def want_optimizer(held: BucketState, body: Mapping[str, Any], wanted: Wanted) -> None:
    """What this rank owns of a bucket's optimizer state; it replaces the one that is there."""
    if held.optimizer is None:
        return
    saved = body["optimizer"]["state"]
    kinds: dict[int, dict[str, Any]] = {}
    for slot, _, _ in overlaps(held, held.own):
        kind = kinds.setdefault(slot.parameter, {})
        for key, data in saved.get(slot.name, {}).items():
            flat = is_tensor(data)
            kind[key] = state_dtype(body, slot.name, data, held.bucket.master) if flat else decode(data, wanted.whole)
    views = held.optimizer.make_room(kinds)
    for slot, start, _ in overlaps(held, held.own):
        for key, view in views.get(slot.parameter, {}).items():
            if is_tensor(saved[slot.name][key]):
                wanted.into(saved[slot.name][key]["$tensor"], start - slot.offset, view)


def is_tensor(data: Any) -> bool:
    return isinstance(data, dict) and "$tensor" in data


def state_dtype(body: Mapping[str, Any], name: str, data: Mapping[str, Any], master: torch.dtype) -> torch.dtype:
    """State that was kept in the dtype of the parameter's master values is kept in that of this step's."""
    flat = body["tensors"].get(f"parameter/{name}")
    return master if flat is not None and data["dtype"] == flat["dtype"] else DTYPES[data["dtype"]]


def whole_optimizer_state(step: Step, body: Mapping[str, Any], wanted: Wanted) -> dict[int, Any]:
    """The state as the user's optimizer holds it, by parameter index."""
    found: dict[int, Any] = {}
    for info in step._infos:

        def read(entry: Mapping[str, Any], info: ParameterInfo = info) -> torch.Tensor:
            return wanted.whole(entry, state_dtype(body, info.name, entry, info.master))

        if info.name in body["optimizer"]["state"]:
            found[info.index] = decode(body["optimizer"]["state"][info.name], read)
    return found


def want_groups(body: Mapping[str, Any], wanted: Wanted) -> list[dict[str, Any]]:
    """The saved hyperparameters of every group, to be put in place when everything has been read."""
    return [decode(saved["options"], wanted.whole) for saved in body["optimizer"]["groups"]]


def put_groups(step: Step, groups: list[dict[str, Any]]) -> None:
    for group, options in zip(step.optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            mine = group.get(key)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)  # LR schedulers write to the tensor that the group was made with
            else:
                group[key] = value


def want_random(step: Step, body: Mapping[str, Any], wanted: Wanted) -> list[torch.Tensor]:
    """This rank's saved random state, or all of them if it had none: then its own is derived from them."""
    rank, world = step._collectives.rank, body["world"]
    own = body["device"] == step._device.type and rank < world
    states = []
    for saved in [rank] if own else range(world):
        states.append(torch.empty(body["tensors"][f"random/{saved}"]["size"], dtype=torch.uint8))
        wanted.into(f"random/{saved}", 0, states[-1])
    return states


def put_random(step: Step, body: Mapping[str, Any], states: list[torch.Tensor]) -> None:
    rank = step._collectives.rank
    if body["device"] == step._device.type and rank < body["world"]:
        step._set_random_state(states[0])
        return
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states) + rank.to_bytes(8, "little"))
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    step._set_random_state(torch.Generator(step._device).manual_seed(seed).get_state())
