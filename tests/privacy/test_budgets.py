"""Published budgets by name, and draws from their distributions."""

import csv
import pathlib

import numpy as np
import pytest

from fedjax_dp.privacy.accounting import budgets

METHODS = pathlib.Path(__file__).resolve().parents[3] / "shared" / "methods"
NAMES = tuple(budgets.DISTRIBUTIONS)


def test_lists_are_those_that_were_published():
    file = METHODS / "heterogeneous_dp_privacy_params.csv"
    if not file.is_file():
        pytest.skip("the published lists are not here")
    with file.open(encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == 9 * (20 + 40 + 60)
    for row in rows:
        count, client = int(row["n_clients"]), int(row["client"])
        name = row["privacy_distribution"]
        assert budgets.published_budgets(name, count)[client] == float(row["epsilon"])
        assert budgets.published_batch_sizes(count)[client] == float(row["batch_size"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", budgets.NUM_CLIENTS)
def test_lists_look_like_draws_from_their_distribution(name, count):
    """Two decimals of positive budgets whose mean is within four standard errors."""
    drawn = budgets.published_budgets(name, count)
    many = budgets.draw_budgets(name, 100_000, np.random.default_rng(0))
    assert drawn.shape == (count,) and np.all(drawn > 0.14)
    np.testing.assert_allclose(drawn, np.round(drawn, 2))
    assert abs(drawn.mean() - many.mean()) < 4 * many.std() / np.sqrt(count)


def test_draws_have_the_moments_of_their_distribution():
    rng = np.random.default_rng(1)
    uniform = budgets.draw_budgets("Dist3", 100_000, rng)
    assert uniform.min() >= 0.2 and uniform.max() <= 5
    assert uniform.mean() == pytest.approx(2.6, abs=0.02)
    mixed = budgets.draw_budgets("Dist2", 100_000, rng)
    assert mixed.mean() == pytest.approx(0.2 * 0.2 + 0.6 * 1.0 + 0.2 * 5.0, abs=0.03)
    assert np.mean(mixed < 0.25) == pytest.approx(0.2, abs=0.01)
    normal = budgets.draw_budgets("Dist1", 100_000, rng)
    # A share Φ(−2) of the draws is not positive.
    assert np.mean(normal == 0.25) == pytest.approx(0.02275, abs=0.002)
    assert normal.min() > 0


def test_batch_sizes_are_powers_of_two():
    for count in budgets.NUM_CLIENTS:
        assert set(budgets.published_batch_sizes(count)) <= set(budgets.BATCH_SIZES)


def test_a_list_cannot_be_changed_from_outside():
    budgets.published_budgets("Dist1", 20)[0] = 99.0
    assert budgets.published_budgets("Dist1", 20)[0] == 2.81


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: budgets.published_budgets("Dist10", 20), "did you mean 'Dist1'"),
        (lambda: budgets.published_budgets("Dist1", 21), "num_clients must be one of 20, 40, 60"),
        (lambda: budgets.published_batch_sizes(10), "num_clients must be one of 20, 40, 60"),
        (lambda: budgets.draw_budgets("Dist", 5, np.random.default_rng(0)), "name must be one of"),
        (
            lambda: budgets.draw_budgets("Dist1", 0, np.random.default_rng(0)),
            "num_clients must be an integer",
        ),
    ],
)
def test_what_does_not_exist_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
