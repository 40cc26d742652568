"""First values of tensors on the meta device, by the model's own initialisation, any part of a tensor at a time.

`weft.state.materialise` calls this. A module's initialisation (`reset_parameters`, a transformers model's
`_init_weights`, the user's `init`) is run once on fake tensors, which records the in-place ops on each parameter. Ops
that treat every element alike (normal_, fill_, mul_, ...) are then repeated chunk by chunk, the draws of each chunk
seeded by its number, so that a rank computes no more than the chunks that its slice touches, and every rank the same
numbers. What cannot be cut (orthogonal_, a copy of something computed) is run for real, one module at a time, and only
the slice is kept.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft._torch import fake_mode, storage_key
from weft.state.checks import dense_stride
from weft.state.recorder import (
    Call,
    Item,
    Recorder,
    UninitialisedError,
    Write,
    covered,
    initialisations,
    since_overwritten,
)

CHUNK = 2**18  # elements; part of what a seed means, so changing it changes every model's first values

# Where a rank's part of a tensor begins and ends, in the order of memory.
Owned = Callable[[str], tuple[int, int]]


class Initialisation:
    """The first values of a model's meta tensors.

    `names` says which of them are asked for; None is all. Buffers get theirs at once, on the module: they are small,
    and every rank holds them.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Callable[[nn.Module], Any] | None,
        *,
        device: torch.device,
        seed: int,
        owned: Owned,
        names: set[str] | None = None,
    ) -> None:
        self.model, self.device, self.seed, self.owned = model, device, seed, owned
        self.base = _hash(seed, "") % 2**32
        self.generator = torch.Generator(device)
        self.parameters = {n: p for n, p in model.named_parameters() if p.is_meta and (names is None or n in names)}
        self.buffers = {n: b for n, b in model.named_buffers() if b.is_meta and (names is None or n in names)}
        self.tensors = dict(_named_tensors(model))
        self.places = _places(model)
        self.name_at = {(module, key): name for name, places in self.places.items() for module, key in places}
        self.items: dict[str, list[Item]] = {name: [] for name in self.parameters}
        self.scratch: dict[torch.dtype, torch.Tensor] = {}
        self.pieces: dict[tuple[Call, str], tuple[int, torch.Tensor]] = {}
        wanted = {id(tensor) for tensor in (*self.parameters.values(), *self.buffers.values())}
        calls = list(initialisations(model, init, wanted))
        written = self._record(calls)
        self._check(written)
        self._fill_buffers(calls)
        self._number()

    # ---- parameters ----

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Write a parameter's elements from `start` on, in the order of its memory, into a flat tensor."""
        items = since_overwritten(self.items[name], self.parameters[name].numel())
        for low, values in self._chunks(name, items, start, start + out.numel(), lambda call: self._piece(call, name)):
            begin, end = max(start, low), min(start + out.numel(), low + values.numel())
            out[begin - start : end - start].copy_(values[begin - low : end - low])
        for key in [key for key in self.pieces if key[1] == name]:
            del self.pieces[key]

    def _chunks(
        self,
        name: str,
        items: Sequence[Item],
        start: int,
        stop: int,
        result: Callable[[Call], tuple[int, torch.Tensor]],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Chunks that cover a range, always cut at the same places, so that every kernel sees the same sizes.

        They are good until the next one: all lie in one buffer.
        """
        parameter = self.parameters[name]
        for low in range(start // CHUNK * CHUNK, stop, CHUNK):
            values = self._scratch(parameter.dtype)[: parameter.numel() - low]
            if parameter.is_floating_point() and not items:
                values.fill_(float("nan"))
            for item in items:
                if isinstance(item, Call):
                    first, piece = result(item)
                    values.copy_(piece[low - first : low - first + values.numel()])
                else:
                    item.apply(values, low, self.generator, self.base + low // CHUNK)
            yield low, values

    def _scratch(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.scratch:
            self.scratch[dtype] = torch.empty(CHUNK, dtype=dtype, device=self.device)
        return self.scratch[dtype]

    def _piece(self, call: Call, name: str) -> tuple[int, torch.Tensor]:
        """This rank's part of a tensor (whole chunks) as a call leaves it."""
        if (call, name) not in self.pieces:
            for other, whole in self._run(call).items():
                start, stop = self.owned(other)
                first = start // CHUNK * CHUNK
                if stop > start and call in self.items[other]:
                    last = min(-(-stop // CHUNK) * CHUNK, whole.numel())
                    self.pieces[call, other] = first, whole[first:last].clone()
        return self.pieces[call, name]

    def _run(self, call: Call) -> dict[str, torch.Tensor]:
        """Run an initialisation for real; returns what it wrote, whole and flat."""
        flats = {name: self._real_before(call, name) for name in sorted(call.touched)}
        twins = {name: _twin(self.tensors[name], flat) for name, flat in flats.items()}
        with self._swapped(twins), self._environment(call):
            call.function()
        return {name: flats[name] for name in call.written}

    def _real_before(self, call: Call, name: str) -> torch.Tensor:
        """A flat tensor with memory and the values that a call finds: what is not asked for is only to be scratch."""
        if name in self.parameters:
            return self._whole_before(call, name)
        module, key = self.places[name][0]
        now = module._buffers[key] if key in module._buffers else self.tensors[name]
        assert now is not None
        flat = torch.zeros(now.numel(), dtype=now.dtype, device=self.device)
        if not now.is_meta:
            flat.as_strided(now.shape, dense_stride(now)).copy_(now)
        return flat

    def _whole_before(self, call: Call, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        before = since_overwritten(self.items[name][: call.found.get(name, 0)], parameter.numel())
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=self.device)
        results = {item: self._run(item)[name] for item in before if isinstance(item, Call)}
        for low, values in self._chunks(name, before, 0, parameter.numel(), lambda item: (0, results[item])):
            flat[low : low + values.numel()].copy_(values)
        return flat

    # ---- recording ----

    def _record(self, calls: Sequence[Call]) -> set[str]:
        """Run every initialisation on fake tensors; returns the buffers that one of them writes."""
        mode = fake_mode()
        twins: dict[str, torch.Tensor] = {}
        with mode:
            for name, tensor in self.tensors.items():
                fake = torch.empty_strided(tensor.shape, dense_stride(tensor), dtype=tensor.dtype, device=self.device)
                twins[name] = _twin(tensor, fake) if isinstance(tensor, nn.Parameter) else fake
        tracked = {storage_key(twin): name for name, twin in twins.items()}
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        written: set[str] = set()
        with self._swapped(twins):
            for call in calls:
                recorder = Recorder(tracked, dtypes)
                with self._environment(call), mode:
                    try:
                        with recorder:
                            call.function()
                    except Exception:
                        call.failed = True  # tried again with real tensors, which raises what is really wrong
                self._take(call, recorder.touched, [] if call.failed else recorder.writes)
                self._check_in_place(call, twins, tracked)
                written |= call.buffers
                if call.failed:
                    written |= self._record_for_real(call)
        return written

    def _take(self, call: Call, touched: set[str], writes: Sequence[tuple[str, Write | None]]) -> None:
        call.touched |= touched
        call.found = {name: len(self.items[name]) for name in call.touched if name in self.items}
        names = {name for name, _ in writes}
        call.buffers |= names & set(self.buffers)
        parameters = [(name, write) for name, write in writes if name in self.parameters]
        if any(write is None for _, write in parameters):
            # All or nothing: a copy of what the same call drew before must see those very numbers.
            call.written = {name for name, _ in parameters}
            for name in call.written:
                self.items[name].append(call)
            return
        for name, write in parameters:
            assert write is not None
            self.items[name].append(write)

    def _record_for_real(self, call: Call) -> set[str]:
        """What a call that fake tensors are not enough for writes: it is run on the module's own tensors."""
        keys = (*call.module._parameters, *call.module._buffers)
        call.touched |= {self.name_at[call.module, key] for key in keys if (call.module, key) in self.name_at}
        twins = {
            name: _twin(tensor, torch.zeros(tensor.numel(), dtype=tensor.dtype, device=self.device))
            for name, tensor in self.tensors.items()
            if name in call.touched
        }
        tracked = {storage_key(twin): name for name, twin in twins.items()}
        recorder = Recorder(tracked, {name: twin.dtype for name, twin in twins.items()})
        with self._swapped(twins), self._environment(call):
            with recorder:
                call.function()
            self._check_in_place(call, twins, tracked)
        self._take(call, recorder.touched, [(name, None) for name, _ in recorder.writes])
        return call.buffers

    # ---- buffers ----

    def _fill_buffers(self, calls: Sequence[Call]) -> None:
        """Give meta buffers memory and values, on their modules."""
        if not self.buffers:
            return
        for name, buffer in self.buffers.items():
            real = torch.empty_strided(buffer.shape, dense_stride(buffer), dtype=buffer.dtype, device=self.device)
            for module, key in self.places[name]:
                module._buffers[key] = real
        # The model's other tensors stay as they are: copies, or tensors without values, stand in for them.
        others = {n: b.clone() for n, b in self.model.named_buffers() if n not in self.buffers}
        for name, parameter in self.model.named_parameters():
            others[name] = _twin(parameter, torch.empty(parameter.numel(), dtype=parameter.dtype, device="meta"))
        for call in calls:
            if not call.buffers:
                continue
            if not call.failed:
                try:
                    with self._swapped(others), self._environment(call):
                        call.function()
                    continue
                except (RuntimeError, NotImplementedError):
                    pass  # a buffer is computed from a parameter
            scratch = sorted(call.touched - set(self.buffers))
            twins = {name: _twin(self.tensors[name], self._real_before(call, name)) for name in scratch}
            with self._swapped(others | twins), self._environment(call):
                call.function()

    # ---- small things ----

    def _check(self, written: set[str]) -> None:
        """Raise unless everything gets a value."""
        lost = [name for name, tensor in self.parameters.items() if not covered(self.items[name], tensor.numel())]
        lost += [name for name, tensor in self.buffers.items() if name not in written and tensor.numel()]
        if not lost:
            return
        kinds = []
        for name in lost[:8]:
            module, key = self.places[name][0]
            kinds.append(f"{name} ({type(module).__name__}.{key}, {list(self.tensors[name].shape)})")
        raise UninitialisedError(
            f"{len(lost)} tensor{'s' if len(lost) > 1 else ''} on the meta device that nothing initialises: "
            f"{', '.join(kinds)}{', ...' if len(lost) > 8 else ''}. Give the class a reset_parameters() that writes "
            "all its own parameters and buffers in place, or pass weft.compile(..., init=function), which is called "
            "with each such module, or init='folder/of/a/checkpoint', or build the model on a real device"
        )

    def _number(self) -> None:
        """Give the draws of every random op numbers of their own."""
        number = 0
        for name, items in self.items.items():
            for position, item in enumerate(items):
                if isinstance(item, Write) and item.random:
                    items[position] = replace(item, number=number)
                    number += self.parameters[name].numel() // CHUNK + 1

    def _check_in_place(self, call: Call, twins: Mapping[str, torch.Tensor], tracked: Mapping[int, str]) -> None:
        """Raise if a module's tensor is another one now, or lies in other memory."""
        for key, tensor in (*call.module._parameters.items(), *call.module._buffers.items()):
            name = self.name_at.get((call.module, key))
            if name is not None and (tensor is not twins[name] or storage_key(tensor) not in tracked):
                raise UninitialisedError(
                    f"the initialisation of {type(call.module).__name__} puts another tensor in the place of {name}, "
                    "and the optimizer holds the old one. Write into it in place, for instance with torch.nn.init or "
                    "tensor.copy_(...)"
                )

    @contextmanager
    def _swapped(self, twins: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The model with other tensors in the place of some, by name."""
        saved = []
        for name, twin in twins.items():
            for module, key in self.places[name]:
                space = module._parameters if key in module._parameters else module._buffers
                saved.append((space, key, space[key]))
                space[key] = twin  # type: ignore[assignment]
        try:
            yield
        finally:
            for space, key, value in reversed(saved):
                space[key] = value  # type: ignore[assignment]

    @contextmanager
    def _environment(self, call: Call) -> Iterator[None]:
        """What an initialisation runs in: no gradients, generators that only the seed and the module decide."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.device(self.device))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            torch.manual_seed(_hash(self.seed, call.path))
            yield


def _hash(seed: int, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{text}".encode(), digest_size=7).digest())


def _twin(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A tensor like another one (its attributes too), in the given memory."""
    value = flat.as_strided(tensor.shape, dense_stride(tensor))
    if not isinstance(tensor, nn.Parameter):
        return value
    twin = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # transformers marks what is loaded already, and skips it.
    twin.__dict__.update({key: item for key, item in tensor.__dict__.items() if key != "_is_hf_initialized"})
    return twin


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each parameter and buffer hangs: tied ones in several places."""
    name_of = {id(tensor): name for name, tensor in _named_tensors(model)}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(name_of[id(tensor)], []).append((module, key))
    return found
