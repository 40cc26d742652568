"""What links are known by: curves through measured points, and their way to disk and back."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.measure.links import links_changed, measure_links
from weft.predict.links import KINDS, Curve, Links, LinkTimes, default_links, sizes_up_to, wire_bytes
from weft.run.collectives import Local, Planning

POINTS = st.lists(st.tuples(st.integers(1, 1 << 26), st.floats(0, 10, allow_subnormal=False)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(POINTS, st.integers(0, 1 << 27), st.integers(0, 1 << 27))
def test_a_larger_message_never_takes_less(points: list[tuple[int, float]], one: int, other: int) -> None:
    curve = Curve.fit(points)
    assert curve(min(one, other)) <= curve(max(one, other)) * (1 + 1e-12)
    low, high = min(seconds for _, seconds in points), max(seconds for _, seconds in points)
    assert all(low * (1 - 1e-9) <= seconds <= high * (1 + 1e-9) for seconds in curve.seconds)


def test_neighbours_that_contradict_the_curve_are_pooled() -> None:
    assert Curve.fit([(4, 3.0), (1, 1.0), (2, 4.0), (3, 2.0)]) == Curve((1, 2, 3, 4), (1.0, 3.0, 3.0, 3.0))
    assert Curve.fit([(1, 1.0), (2, 2.0), (3, 3.0)]).seconds == (1.0, 2.0, 3.0)
    assert Curve.fit([(1, 6.0), (2, 4.0), (3, 2.0)]).seconds == (4.0, 4.0, 4.0)
    assert Curve.fit([(5, 1.0), (5, 3.0)]) == Curve((5,), (2.0,))


def test_a_curve_is_straight_between_points_and_beyond_them() -> None:
    curve = Curve((100, 200, 400), (1.0, 2.0, 6.0))
    assert [curve(size) for size in (0, 100, 150, 200, 300, 400, 500, 1000)] == [1, 1, 1.5, 2, 4, 6, 8, 18]
    assert Curve((100,), (1.0,))(10_000) == 1.0


def test_curves_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Curve.fit([])
    with pytest.raises(ValueError, match="must increase"):
        Curve((2, 1), (1.0, 1.0))
    with pytest.raises(ValueError, match="time of nan s"):
        Curve.fit([(1, float("nan"))])
    with pytest.raises(ValueError, match="below the one before"):
        Curve((1, 2), (2.0, 1.0))


def test_latency_is_what_a_queue_hides() -> None:
    times = LinkTimes(service=Curve((1, 3), (1.0, 3.0)), alone=Curve((1, 3), (1.5, 2.0)))
    assert (times.latency(1), times.latency(3)) == (0.5, 0.0)


def test_links_go_through_json_unchanged() -> None:
    links = default_links(4, gbit=1.0)
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links


def test_nominal_links() -> None:
    links = default_links(4, gbit=8.0, latency=1e-3, efficiency=0.5)
    mega = 1 << 20
    assert links.gather.service(mega) == pytest.approx(0.75 * mega / 0.5e9)
    assert links.all_reduce.service(mega) == pytest.approx(2 * 0.75 * mega / 0.5e9)
    assert links.reduce_scatter.latency(mega) == pytest.approx(1e-3)
    assert wire_bytes("gather", 800, 4) == 600
    nothing = default_links(1)
    assert all(nothing.times(kind).alone(mega) == 0 for kind in KINDS)
    with pytest.raises(ValueError, match="0 Gbit/s"):
        default_links(2, gbit=0)


def test_sizes_end_at_the_largest_bucket() -> None:
    assert sizes_up_to(1 << 20) == [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    assert sizes_up_to(100_000) == [1 << 12, 1 << 14, 1 << 16, 100_000]
    assert sizes_up_to(10) == [1 << 12]


def test_one_process_and_a_fake_group_have_nothing_to_measure() -> None:
    links = measure_links(Local(), device=torch.device("cpu"), largest=1 << 20)
    assert links == default_links(1)
    assert not links_changed(Local(), links, 1 << 20)
    planning = Planning.__new__(Planning)
    planning.world = 16
    assert measure_links(planning, device=torch.device("cpu"), largest=1 << 20) == default_links(16)
    with pytest.raises(ValueError, match="largest=0"):
        measure_links(Local(), device=torch.device("cpu"), largest=0)
