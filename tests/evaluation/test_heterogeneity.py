"""The measure of heterogeneity, against the chapter's printed values and by hand."""

import jax
import numpy as np
import pytest
from marks import slow, telling
from oracles.splitting import LeastSquares, chapter_data

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.evaluation import heterogeneity
from fedjax_dp.models.dense import least_squares


def measured(a, b, theta):
    clients = [{"x": x.astype("f4"), "y": y.astype("f4")} for x, y in zip(a, b, strict=True)]
    data = FederatedData.from_clients(clients)
    model = least_squares(jax.ShapeDtypeStruct(a.shape[2:], np.float32), scale=a.shape[1])
    return heterogeneity(model, data, theta.astype("f4"))


@pytest.mark.parametrize(
    ("sigma", "printed"),
    [
        pytest.param(0.25, 119e3, marks=slow),
        pytest.param(2.0, 7.61e6, marks=telling),
        pytest.param(10.0, 190.3e6, marks=slow),
    ],
)
def test_the_chapters_generator_has_the_values_that_figure_2_7_prints(sigma, printed):
    a, b = chapter_data(sigma)
    found = measured(a, b, LeastSquares(a, b).optimum)
    # Printed to three or four digits.
    np.testing.assert_allclose(found.doubled, printed, rtol=5e-3)
    assert found.doubled == 4 * found.value


def test_by_hand_and_zero_where_all_clients_agree():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 40, 4)).astype("f4").astype("f8")
    b = rng.normal(size=(3, 40)).astype("f4").astype("f8")
    problem = LeastSquares(a, b)
    found = measured(a, b, problem.optimum)
    by_hand = np.sum(problem.gradients(problem.optimum) ** 2, axis=1)
    np.testing.assert_allclose(found.by_client, by_hand, rtol=1e-4)
    same = np.repeat(a[:1], 3, axis=0), np.repeat(b[:1], 3, axis=0)
    assert measured(*same, LeastSquares(*same).optimum).value < 1e-6 * found.value
