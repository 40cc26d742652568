"""Plain values survive the way through JSON with their types, whatever they are nested in."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.saving.values import decode, encode

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(keys, st.integers()).map(Counter)
    ),
    max_leaves=20,
)


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)

    def read(entry: Any) -> torch.Tensor:
        flat = tensors.get(entry["$tensor"], torch.empty(0))
        return flat.clone().as_strided(entry["shape"], entry["stride"])

    return decode(json.loads(text), read)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(k), types(v)) for k, v in value.items()]
    return (type(value), [types(item) for item in value]) if isinstance(value, (list, tuple)) else type(value)


@given(nested)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert types(found) == types(value)


def test_tensors_keep_dtype_values_and_strides() -> None:
    values = [
        torch.tensor(math.pi, dtype=torch.float64),
        torch.tensor(float("nan"), dtype=torch.bfloat16),
        torch.tensor(True),
        torch.arange(6).view(2, 3).t(),
        torch.arange(12.0)[::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    for value in values:
        found = through_json(value)
        assert found.dtype is value.dtype
        assert torch.equal(found.nan_to_num(), value.nan_to_num())
    assert through_json(values[-1]).stride() == values[-1].stride()
    assert through_json(torch.float16) is torch.float16
    alike = through_json({"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    assert torch.equal(alike["a/b"], torch.ones(2))
    assert torch.equal(alike["a"]["b"], torch.zeros(2))


def test_what_is_refused_is_named() -> None:
    with pytest.raises(TypeError, match="extra/a/1 is a set"):
        encode({"a": [0, {1}]}, "extra", {})
    with pytest.raises(TypeError, match=r"extra is a tensor of torch.complex128"):
        encode(torch.zeros(2, dtype=torch.complex128), "extra", {})
