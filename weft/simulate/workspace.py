"""Memory that oneDNN's ops on CPUs take and that no tensor of the trace shows, fitted to what processes took.

Others were measured too (matrix products, attention, norms, embeddings): what they take is too little to matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from weft._torch import size_hint

aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """What an op takes only while it runs."""
    if node.target is aten.convolution.default:
        source, weight = node.args[:2]
        if _is_plain_product(weight, node.args[3]):
            return 0
        # The weight, and the larger of input and result, in the kernel's own order.
        return _nbytes(weight) + max(_nbytes(source), _nbytes(node))
    if node.target is aten.convolution_backward.default:
        gradient, source, weight = node.args[:3]
        if _is_plain_product(weight, node.args[4]):
            return 0
        return max(_nbytes(weight), _nbytes(gradient) + _nbytes(source))
    if node.target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        return _nbytes(node.args[1]) + _nbytes(node.args[2])  # the weights in the kernel's own order
    return 0


def hidden_output_bytes(node: fx.Node) -> int:
    """What an op's real outputs hold beyond its fake ones: an LSTM keeps gates and states for its backward."""
    if node.target is not aten.mkldnn_rnn_layer.default:
        return 0
    source, recurrent = _fake(node.args[0]), _fake(node.args[2])
    if source is None or recurrent is None:
        return 0
    length, batch, inputs = (size_hint(size) for size in source.shape)  # time comes first in this op
    hidden = size_hint(recurrent.shape[1])
    widest = max(inputs, hidden)
    return batch * source.itemsize * (length * (9 * hidden + 6 * widest) + 10 * widest)


def _is_plain_product(weight: Any, stride: Any) -> bool:
    """A 1 x 1 convolution at every point is a matrix product of the tensors as they are."""
    fake = _fake(weight)
    return fake is not None and all(size == 1 for size in (*fake.shape[2:], *stride))


def _fake(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _nbytes(node: Any) -> int:
    fake = _fake(node)
    return 0 if fake is None else size_hint(fake.numel()) * fake.itemsize
