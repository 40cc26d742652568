"""Every mode trains as plain eager PyTorch does: fp64, five steps, losses, norms, parameters and buffers to 1e-12."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.models import CASES
from tests.ranks import Ranks
from tests.reference import train_compiled, train_eagerly, worst_error

MODES = ("replicate", "zero1", "zero2", "zero3")
TOLERANCE = 1e-12
CLIP = 0.05  # well below the norms of these models


def errors(rank: int, name: str, world: int) -> dict[str, tuple[float, str]]:
    """The worst error of every combination of mode, accumulation and clipping on this rank."""
    found = {}
    for accumulate, clip in product((1, 3), (None, CLIP)):
        expected = train_eagerly(name, world=world, accumulate=accumulate, clip=clip)
        if clip is not None:
            assert max(expected.norms) > CLIP, "the clipping must matter"
        for mode in MODES:
            result = train_compiled(name, mode, rank=rank, accumulate=accumulate, clip=clip)
            found[f"{mode}, accumulate {accumulate}, clip {clip}"] = worst_error(result, expected, rank)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_mode_trains_as_eager_does(ranks: Callable[[int], Ranks], name: str, world: int) -> None:
    answers = [errors(0, name, 1)] if world == 1 else ranks(world).run(errors, name, world)
    wrong = [
        f"rank {rank}, {setting}: {error:.1e} in {where}"
        for rank, answer in enumerate(answers)
        for setting, (error, where) in answer.items()
        if not error <= TOLERANCE
    ]
    assert not wrong, "\n".join(wrong)
