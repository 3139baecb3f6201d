"""Laws fitted to a few sizes: exact where the law is, and never beyond what the quantity can do."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memhier.planning.fits import GrowthLaw, fit_work

SIZES = np.array([1000, 1700, 2900, 5000, 8400])


@given(slope=st.floats(0, 1), level=st.floats(1e-3, 1e6), times=st.floats(1, 1e6))
def test_a_power_law_is_found_and_continued(slope: float, level: float, times: float) -> None:
    law = GrowthLaw.fit(SIZES, level * (SIZES / SIZES[-1]) ** slope)
    assert law.at(SIZES[-1] * times) == pytest.approx(level * times**slope, rel=1e-3)
    assert law.residual < 1e-6


@given(values=st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5), times=st.floats(1, 1e6), more=st.floats(1, 1e3))
def test_growth_stays_between_none_and_linear(values: list[float], times: float, more: float) -> None:
    law = GrowthLaw.fit(SIZES, values)
    near, far = law.at(SIZES[-1] * times), law.at(SIZES[-1] * times * more)
    assert near * (1 - 1e-9) <= far <= near * more * (1 + 1e-9)
    for at in (SIZES[-1] * times, SIZES[-1] * times * more):
        low, high = law.interval(at)
        assert low <= law.at(at) * (1 + 1e-9)
        assert law.at(at) <= high * (1 + 1e-9)
        assert high / low <= at / SIZES[-1] * (law.interval(SIZES[-1])[1] / law.interval(SIZES[-1])[0]) * (1 + 1e-9)


def test_growth_that_dies_away_is_not_continued() -> None:
    """The reads of a set that saturates at 100: the law stays nearer to it than a power law through the same sizes."""
    values = 100 * (1 - np.exp(-SIZES / 4000))
    law = GrowthLaw.fit(SIZES, values)
    power = np.polyfit(np.log(SIZES), np.log(values), 1)
    far = 20 * SIZES[-1]
    assert 88 < law.at(far) < 250 < np.exp(np.polyval(power, np.log(far)))


def test_more_scatter_gives_a_wider_interval() -> None:
    random = np.random.default_rng(0)
    smooth, rough = (
        GrowthLaw.fit(SIZES, SIZES**0.3 * np.exp(random.normal(0, sigma, 5))).interval(10**7) for sigma in (0.0, 0.4)
    )
    assert 1 < smooth[1] / smooth[0] < rough[1] / rough[0]


def test_the_interval_holds_the_value() -> None:
    """Values that scatter by 6 % around a power law lie in the interval of 95 % at ten times the size."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        law = GrowthLaw.fit(SIZES, SIZES**0.3 * np.exp(random.normal(0, 0.06, 5)))
        far = 10 * SIZES[-1]
        low, high = law.interval(far)
        inside += low <= far**0.3 <= high
    assert inside >= 0.9 * 400


@pytest.mark.parametrize(
    ("sizes", "values"), [([1], [1]), ([5, 5], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1]), ([1, 2], [1, np.nan])]
)
def test_too_little_to_fit_is_refused(sizes: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        GrowthLaw.fit(sizes, values)


@given(costs=st.lists(st.floats(0, 10), min_size=3, max_size=3), seed=st.integers(0, 2**31))
def test_known_work_gives_back_its_cost(costs: list[float], seed: int) -> None:
    work = np.random.default_rng(seed).uniform(0.1, 10, (12, 3))
    assume(sum(costs) > 0.01)
    seconds = work @ costs
    found = fit_work(work, seconds)
    assert (found >= 0).all()
    np.testing.assert_allclose(work @ found, seconds, rtol=1e-4)


def test_no_cost_is_negative() -> None:
    assert fit_work([[1, 1], [1, 2], [1, 3]], [3, 2, 1]).min() >= 0
