"""Shared fixtures: process groups that tests of one world size reuse."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)
# Measurements and plans of tests are not those of the user; processes that tests start share them.
os.environ.setdefault("WEFT_CACHE_DIR", tempfile.mkdtemp(prefix="weft-test-cache-"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world)`: that many processes in one gloo group, one world size alive at a time."""
    pools: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        for size, pool in pools.items():
            if size != world:
                pool.stop()
        return pools.setdefault(world, Ranks(world))

    yield of
    for pool in pools.values():
        pool.stop()
