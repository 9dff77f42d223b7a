"""Charts are of the numbers that they are given, as their own ticks measure them."""

import math

import numpy as np
import pytest
from pages import charts

from fedjax_dp.io.page import Axis, line_chart

ROUND = Axis("round", is_whole=True)


def only(*args, **options):
    (chart,) = charts(line_chart("a <title>", *args, **options)).values()
    return chart


@pytest.mark.parametrize("scale", [1e-7, 1.0, 3.7e6])
def test_points_stand_where_the_ticks_say(scale):
    values = scale * np.random.default_rng(0).normal(size=20)
    points = list(zip(range(3, 23), values, strict=True))
    chart = only({"one": points, "none": [], "two": points[:5]}, ROUND, Axis("y"))
    assert len(chart.curves) == 2
    span = values.max() - values.min()
    for (x, y), (seen_x, seen_y) in zip(points, chart.curves[0], strict=True):
        # Places have one digit after the point, of 326 and of 180 units.
        assert abs(x - seen_x) < 20 * 0.2 / 326 and abs(y - seen_y) < 2 * span * 0.2 / 180
    assert all(tick == int(tick) for tick in chart.ticks[0])
    assert 3 <= len(chart.ticks[1]) <= 7 and chart.legend == ["one", "two"]


def test_limits_and_fixed_ends_are_drawn():
    chart = only({"spent": [(1, 2.0), (2, 3.0)]}, ROUND, Axis("ε", 0.0), {"budget": 8.0})
    assert chart.limits == pytest.approx([8.0], abs=0.01) and chart.ticks[1][0] == 0
    assert chart.legend == ["spent", "budget"]
    assert chart.said == "a <title>: spent from 2 at 1 to 3 at 2; budget 8"


@pytest.mark.parametrize("value", [0.0, -5.0, 1e-30, 1e90])
def test_one_point_is_in_the_middle(value):
    text = line_chart("t", {"a": [(4.0, value)]}, ROUND, Axis("y"))
    assert 'points="225.0,100.0"' in text and "nan" not in text and "inf" not in text


def test_no_points_draw_nothing():
    assert line_chart("t", {"a": [], "b": []}, ROUND, Axis("y"), {"limit": 1.0}) == ""


def test_long_curves_keep_their_ends_and_every_spike():
    points = [(float(i), math.sin(i / 900)) for i in range(10_000)]
    points[7_777] = (7_777.0, 50.0)
    points[3_333] = (3_333.0, -50.0)
    chart = only({"a": points}, ROUND, Axis("y"))
    (curve,) = chart.curves
    assert len(curve) <= 402
    assert curve[0][0] == pytest.approx(0, abs=20) and curve[-1][0] == pytest.approx(9_999, abs=20)
    ends = min(curve, key=lambda p: p[1]), max(curve, key=lambda p: p[1])
    assert ends == (
        (pytest.approx(3_333, abs=20), pytest.approx(-50, abs=0.5)),
        (pytest.approx(7_777, abs=20), pytest.approx(50, abs=0.5)),
    )
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
