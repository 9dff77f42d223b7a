"""Published budgets and batch sizes by name."""

import csv
import pathlib

import numpy as np
import pytest

from fedjax_dp.privacy.accounting import budgets

METHODS = pathlib.Path(__file__).resolve().parents[3] / "shared" / "methods"
# Malekmohammadi and others 2024, section 3.6: shares of normal distributions (share, mean, standard
# deviation), as the published lists show, or the ends of a uniform one.
SOURCE = {
    "Dist1": ((1.0, 2.0, 1.0),),
    "Dist2": ((0.2, 0.2, 0.01), (0.6, 1.0, 0.1), (0.2, 5.0, 1.0)),
    "Dist3": ((0.2, 5.0),),
    "Dist4": ((0.2, 0.2, 0.01), (0.6, 0.5, 0.1), (0.2, 2.0, 1.0)),
    "Dist5": ((0.2, 2.0),),
    "Dist6": ((0.3, 0.2, 0.01), (0.5, 0.5, 0.1), (0.2, 1.0, 0.1)),
    "Dist7": ((0.2, 1.0),),
    "Dist8": ((0.6, 0.2, 0.01), (0.4, 0.5, 0.1)),
    "Dist9": ((0.2, 0.5),),
}


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


@pytest.mark.parametrize("name", budgets.DISTRIBUTIONS)
@pytest.mark.parametrize("count", budgets.NUM_CLIENTS)
def test_lists_have_the_mean_of_their_distribution(name, count):
    """Two decimals of positive budgets whose mean is within four standard errors."""
    drawn, parts = budgets.published_budgets(name, count), SOURCE[name]
    if len(parts[0]) == 2:
        ((low, high),) = parts
        mean, variance = (low + high) / 2, (high - low) ** 2 / 12
    else:
        shares, means, stddevs = np.array(parts).T
        mean = shares @ means
        variance = shares @ (means**2 + stddevs**2) - mean**2
    assert drawn.shape == (count,) and np.all(drawn > 0.14)
    np.testing.assert_allclose(drawn, np.round(drawn, 2))
    assert abs(drawn.mean() - mean) < 4 * np.sqrt(variance / count)


@pytest.mark.parametrize(("name", "factor"), [("Dist2 * 10", 10), ("Dist9 * 0.5", 0.5)])
def test_a_multiple_of_a_list_multiplies_every_budget(name, factor):
    plain = budgets.published_budgets(name.partition(" ")[0], 40)
    np.testing.assert_array_equal(budgets.published_budgets(name, 40), plain * factor)


@pytest.mark.parametrize(
    "name", ["Dist2*10", "Dist2 * 0", "Dist2 * -1", "Dist2 * ten", "Dist0 * 2"]
)
def test_what_is_no_multiple_of_a_list_is_refused(name):
    with pytest.raises(ValueError, match="name must"):
        budgets.published_budgets(name, 20)


def test_batch_sizes_are_powers_of_two():
    for count in budgets.NUM_CLIENTS:
        assert set(budgets.published_batch_sizes(count)) <= {16, 32, 64, 128}


def test_a_list_cannot_be_changed_from_outside():
    budgets.published_budgets("Dist1", 20)[0] = 99.0
    assert budgets.published_budgets("Dist1", 20)[0] == 2.81


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: budgets.published_budgets("Dist10", 20), "did you mean 'Dist1'"),
        (lambda: budgets.published_budgets("Dist1", 21), "num_clients must be one of 20, 40, 60"),
        (lambda: budgets.published_batch_sizes(10), "num_clients must be one of 20, 40, 60"),
    ],
)
def test_what_does_not_exist_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
