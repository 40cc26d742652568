"""What an op takes at least: its arithmetic at the device's rate, its bytes at the memory's, and the call itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from weft._torch import flop_formulas, op_schema
from weft.measure.clock import timed
from weft.measure.store import Store
from weft.measure.values import TensorSpec, is_view, tensors_of, value_of

aten = torch.ops.aten

PYTHON_SECONDS = 1e-7  # an item of a tuple, arithmetic of sizes
# Bytes of an embedding's table are read only where it is asked for rows.
LOOKUPS = {aten.embedding, aten.index, aten.gather, aten.index_select}


def flops_and_bytes(node: fx.Node) -> tuple[float, float]:
    """Arithmetic of an op, and the bytes it reads and writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return 0.0, 0.0
    packet = node.target.overloadpacket
    outputs = tensors_of(node)
    inputs = [tensors_of(source) for source in node.all_input_nodes if source is not node.kwargs.get("out")]
    written = sum(spec.numel * spec.dtype.itemsize for spec in outputs)
    if packet in LOOKUPS:
        read = written + sum(spec.nbytes for specs in inputs[1:] for spec in specs)
    else:
        read = sum(spec.nbytes for specs in inputs for spec in specs)
    formula = FORMULAS.get(packet)
    if formula is not None:
        flops = formula(node)
    elif packet in flop_formulas:
        flops = _counted(packet, node)
    else:
        flops = float(sum(spec.numel for spec in outputs))
    return flops, float(read + written)


def _counted(packet: Any, node: fx.Node) -> float:
    """By PyTorch's formula, which wants shapes where an op has tensors."""

    def shapes(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty(value.shape, device="meta")
        if isinstance(value, (list, tuple)):
            return tuple(shapes(item) for item in value)
        return value

    args = fx.node.map_arg(node.args, lambda source: shapes(value_of(source)))
    kwargs = {
        name: fx.node.map_arg(value, lambda source: shapes(value_of(source)))
        for name, value in node.kwargs.items()
        if name != "out"
    }
    try:
        return float(flop_formulas[packet](*args, **kwargs, out_val=shapes(value_of(node))))
    except Exception:  # a form of the op that the formula does not know
        return float(sum(spec.numel for spec in tensors_of(node)))


def _shape(node: fx.Node, position: int) -> tuple[int, ...]:
    spec = value_of(node.args[position])  # type: ignore[arg-type]
    assert isinstance(spec, TensorSpec)
    return spec.shape


def _attention(node: fx.Node, first: int, products: int) -> float:
    """Fused attention: so many products of (queries x keys x head)."""
    *batch, queries, width = _shape(node, first)
    keys = _shape(node, first + 1)[-2]
    return 2.0 * products * math.prod(batch) * queries * keys * width


def _recurrent(node: fx.Node, passes: int) -> float:
    """oneDNN's LSTM layer: two weights, each multiplied with every row of its (length, batch, width) input."""
    length, batch = _shape(node, 0)[:2]
    weights = sum(math.prod(_shape(node, position)) for position in (1, 2))
    return 2.0 * passes * length * batch * weights


# What PyTorch has no formula for.
FORMULAS: dict[Any, Callable[[fx.Node], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda node: _attention(node, 0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda node: _attention(node, 1, 5),
    aten.mkldnn_rnn_layer: lambda node: _recurrent(node, 1),
    aten.mkldnn_rnn_layer_backward: lambda node: _recurrent(node, 2),
}


@dataclass(frozen=True)
class Roofline:
    """A device's rates. `flops_per_second` by dtype, for instance {"float32": 1e11}."""

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    dispatch_seconds: float

    def seconds(self, node: fx.Node) -> float:
        if op_schema(node.target) is None:
            return PYTHON_SECONDS
        flops, nbytes = flops_and_bytes(node)
        return self.dispatch_seconds + max(flops / self.rate(node), nbytes / self.bytes_per_second)

    def rate(self, node: fx.Node) -> float:
        """The rate of an op's arithmetic: that of its first floating-point argument."""
        for source in node.all_input_nodes:
            for spec in tensors_of(source):
                name = str(spec.dtype).removeprefix("torch.")
                if name in self.flops_per_second:
                    return self.flops_per_second[name]
        return self.flops_per_second["float32"]

    def as_json(self) -> dict[str, Any]:
        return {
            "flops_per_second": dict(self.flops_per_second),
            "bytes_per_second": self.bytes_per_second,
            "dispatch_seconds": self.dispatch_seconds,
        }


def measure_roofline(device: torch.device, store: Store) -> Roofline:
    """A device's rates, from the store or measured in some hundred milliseconds."""
    known = store.get("roofline", "rates")
    if known is not None:
        return Roofline(**known)
    cpu = device.type == "cpu"
    generator = torch.Generator(device).manual_seed(0)
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in (128, 512) if cpu else (4096,):
            matrix = torch.rand(size, size, generator=generator, device=device).to(dtype)
            try:
                seconds = _typical(partial(torch.mm, matrix, matrix), device, 5)
            except RuntimeError:
                break  # a dtype that the device cannot multiply; float32 it always can
            rates[str(dtype).removeprefix("torch.")] = 2.0 * size**3 / seconds
            if seconds > 1e-3:
                break  # half precision without hardware for it: seen well enough
    long = torch.rand((64 << 20) // 4 if cpu else (1 << 30) // 4, generator=generator, device=device)
    other = torch.empty_like(long)
    bandwidth = 2.0 * long.nbytes / _typical(lambda: other.copy_(long), device, 5)
    tiny = torch.rand(16, generator=generator, device=device)
    # A GPU is kept busy until the call is issued, so that its time is not the host's.
    before = None if cpu else partial(other.copy_, long)
    result = Roofline(rates, bandwidth, _typical(lambda: aten.add.Tensor(tiny, tiny), device, 50, before))
    store.put("roofline", "rates", result.as_json())
    return result


def _typical(
    call: Callable[[], Any], device: torch.device, count: int, before: Callable[[], Any] | None = None
) -> float:
    seconds: list[float] = []
    with torch.no_grad():
        call()
        for _ in range(count):
            if before is not None:
                before()
            seconds.append(timed(call, device)[0])
    return statistics.median(seconds)
