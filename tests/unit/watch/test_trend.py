"""Slopes of noisy series, and which series grow steadily."""

from __future__ import annotations

import random

import pytest

from holdall.tools.watch.trend import fit_steady_growth, fit_trend


def test_the_slope_of_a_line_is_exact() -> None:
    xs = [float(x) for x in range(100)]
    found = fit_trend(xs, [7.0 + 3.0 * x for x in xs])
    assert found is not None
    assert (found.slope, found.low, found.high) == (3.0, 3.0, 3.0)


def test_a_third_of_outliers_does_not_change_the_slope() -> None:
    rng = random.Random(1)
    xs = [float(x) for x in range(300)]
    ys = [2.0 * x + (rng.uniform(0, 1e5) if rng.random() < 0.3 else rng.gauss(0, 3)) for x in xs]
    found = fit_trend(xs, ys)
    assert found is not None
    assert found.slope == pytest.approx(2.0, rel=0.2)
    assert found.low < 2.0 < found.high


def test_few_points_give_no_slope() -> None:
    assert fit_trend([1.0] * 5, [1.0] * 5) is None
    assert fit_trend([], []) is None
    assert fit_trend([3.0] * 100, [float(x) for x in range(100)]) is None


@pytest.mark.parametrize("seed", range(200))
def test_noise_is_not_steady_growth(seed: int) -> None:
    rng = random.Random(seed)
    level = 0.0
    ys = []
    for _ in range(300):  # Neighbours depend on each other, as readings do.
        level = 0.9 * level + rng.gauss(0, 1)
        ys.append(level)
    assert fit_steady_growth([float(x) for x in range(300)], ys) is None


@pytest.mark.parametrize("at", [30, 100, 150, 200, 270])
def test_one_jump_is_not_steady_growth(at: int) -> None:
    rng = random.Random(at)
    ys = [rng.gauss(0, 1) + (1000.0 if x >= at else 0.0) for x in range(300)]
    assert fit_steady_growth([float(x) for x in range(300)], ys) is None


def test_a_slow_leak_under_a_sawtooth_is_steady_growth() -> None:
    rng = random.Random(5)
    xs = [10.0 * x for x in range(400)]
    ys = [512.0 * x + 200_000.0 * (i % 7) + rng.gauss(0, 20_000) for i, x in enumerate(xs)]
    found = fit_steady_growth(xs, ys)
    assert found is not None
    assert found.slope == pytest.approx(512.0, rel=0.15)
    assert found.low > 0
