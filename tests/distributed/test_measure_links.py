"""Ranks measure their links together: one answer for all, and an error where a rank does not come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import weft.measure.links
from tests.ranks import Ranks
from weft.errors import PeerError
from weft.measure.links import links_changed, measure_links
from weft.predict.links import KINDS, Curve, Links, LinkTimes
from weft.run.collectives import connect, peers_lost

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
LARGEST = 1 << 20


def faster(links: Links, factor: float) -> Links:
    """The links as they would be on a network so many times as fast."""
    value = links.to_json()
    for kind in KINDS:
        for curve in value[kind].values():
            curve["seconds"] = [seconds / factor for seconds in curve["seconds"]]
    return Links.from_json(value)


def measured(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    collectives = connect(CPU, None, timedelta(seconds=30))
    said: list[str] = []
    # Not the same clock everywhere: one rank is late to the first message.
    time.sleep(0.2 * rank)
    links = measure_links(collectives, device=CPU, largest=LARGEST, progress=said.append, seconds=1.0)
    # Other programs beside the tests make loopback half as fast or twice: tell networks apart that differ by far more.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(weft.measure.links, "CHANGED", 0.85)
    probes = [links_changed(collectives, links, LARGEST) for _ in range(3)]
    other = [links_changed(collectives, faster(links, factor), LARGEST) for factor in (0.01, 100)]
    stored = measure_links(
        collectives,
        device=CPU,
        largest=LARGEST,
        store_get=lambda: faster(links, 100) if rank == 0 else None,
        seconds=0.5,
    )
    monkeypatch.undo()
    return {
        "links": links.to_json(),
        "said": said,
        "probes": probes,
        "other": other,
        "stored": stored.to_json(),
        "again": stored == faster(links, 100),
    }


@pytest.fixture(scope="module")
def found(ranks: Callable[[int], Ranks]) -> list[dict[str, Any]]:
    """What each of two ranks measured."""
    return ranks(2).run(measured)


def test_all_ranks_get_the_same_links(found: list[dict[str, Any]]) -> None:
    assert json.dumps(found[0]["links"]) == json.dumps(found[1]["links"])
    assert found[0]["stored"] == found[1]["stored"]
    links = Links.from_json(found[0]["links"])
    assert links.world == 2
    for kind in KINDS:
        times: LinkTimes = links.times(kind)
        curve: Curve = times.alone
        assert curve.bytes[0] == 4096
        assert curve.bytes[-1] == LARGEST
        assert all(0 < seconds < 1 for seconds in (*curve.seconds, *times.service.seconds))
    assert 0.1 <= links.shared <= 1
    assert 1 <= links.compute_slowdown < 100
    assert 1 <= links.collective_slowdown < 100
    assert 0 <= links.cpu_seconds_per_byte < 1e-6
    assert 0 < links.small < 1
    assert found[0]["said"]


def test_a_probe_tells_one_network_from_another(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["probes"] == second["probes"]
    assert not all(first["probes"])  # a busy machine may spoil one
    assert first["other"] == second["other"] == [True, True]
    assert not first["again"]
    assert not second["again"]


def alone(rank: int) -> str:
    collectives = connect(CPU, None, timedelta(seconds=2))
    collectives.gather_objects(None)
    if rank == 1:
        return ""
    started = time.monotonic()
    try:
        measure_links(collectives, device=CPU, largest=LARGEST)
    except PeerError as error:
        assert time.monotonic() - started < 10
        return str(error)
    finally:
        peers_lost.clear()
    return "it went through"


def test_a_rank_that_never_comes(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    said = pool.run(alone)[0]
    pool.stop()  # a group that has failed serves no other test
    assert said.startswith("rank 0 waited for rank 1 in"), said
    assert "timeout 2 s" in said
