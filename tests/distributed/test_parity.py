"""Every mode trains as plain eager PyTorch does: fp64, five steps, losses, norms, parameters and buffers to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest

from tests.ecosystem import ECOSYSTEM
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
    check(answers)


def check(answers: Sequence[dict[str, tuple[float, str]]]) -> None:
    """No setting on any rank is further from eager than rounding."""
    wrong = [
        f"rank {rank}, {setting}: {error:.1e} in {where}"
        for rank, answer in enumerate(answers)
        for setting, (error, where) in answer.items()
        if not error <= TOLERANCE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["tiny", "partly_used", "checkpointed_gpt"])
def test_four_ranks_train_as_eager_does(ranks: Callable[[int], Ranks], name: str) -> None:
    check(ranks(4).run(errors, name, 4))


def errors_of_unmodified(rank: int, name: str) -> dict[str, tuple[float, str]]:
    found = {}
    expected = train_eagerly(name, world=2, clip=CLIP, steps=3)
    for mode in ("replicate", "zero3"):
        result = train_compiled(name, mode, rank=rank, clip=CLIP, steps=3, bucket_bytes=20_000)
        found[mode] = worst_error(result, expected, rank)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", ECOSYSTEM)
def test_unmodified_transformers_train_as_in_eager(ranks: Callable[[int], Ranks], name: str) -> None:
    check(ranks(2).run(errors_of_unmodified, name))
