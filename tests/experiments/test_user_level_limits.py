"""Bounds on what BLUR and LUS change hold for random clients, and are reached by some."""

import itertools
import math

import numpy as np
import pytest
from marks import telling

from experiments.user_level_dp import limits, messages

RESULTS = limits.HERE / "results" / "limits"


def angle(a, b):
    return math.degrees(math.acos(min(1.0, a @ b / np.linalg.norm(a) / np.linalg.norm(b))))


@telling
@pytest.mark.parametrize("name", ["blur", "checks", "noise"])
def test_tables_are_what_the_script_computes(name):
    texts = (RESULTS / f"{name}.csv").read_text("utf-8"), limits.as_csv(limits.TABLES[name]())
    for line, again in zip(*(text.splitlines() for text in texts), strict=True):
        for value, computed in zip(line.split(","), again.split(","), strict=True):
            # What is zero but for rounding differs between machines.
            assert value == computed or float(value) == pytest.approx(
                float(computed), rel=1e-5, abs=1e-9
            )


def test_discounts_are_those_of_later_pulls():
    is_pulled = np.array([False, True, False, True, True])
    # By hand: three pulls come after step 0, two after steps 1 and 2, one after step 3.
    expected = 0.9 ** np.array([3, 2, 2, 1, 0])
    np.testing.assert_allclose(limits.discounts(is_pulled, 0.3, 1 / 3), expected)
    np.testing.assert_allclose(
        limits.printed_discounts(is_pulled, 0.3, 1 / 3), [1, 0.9, 1, 0.9**3, 0.9**4]
    )


@pytest.mark.parametrize(
    ("setting", "strength"), list(itertools.product(limits.SETTINGS, limits.STRENGTHS))
)
def test_a_pull_shortens_and_turns_no_more_than_its_bounds(setting, strength):
    """On convex quadratics, and for gradients that never point against each other."""
    rng = np.random.default_rng(0)
    steps, rate = setting.steps, setting.rate
    least_of_quadratics = limits.least_ratio(rate, steps, strength)
    least = (1 - strength * rate) ** (steps - 1)
    for _ in range(20):
        basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
        curvature = (1 / rate - strength) * rng.uniform(size=6) ** 4
        hessian, slope = basis * curvature @ basis.T, rng.normal(size=6)
        quadratic_loss = (lambda w, _, h=hessian, g=slope: h @ w + g, least_of_quadratics)
        fixed = np.abs(rng.normal(size=(steps, 6))) * rng.exponential(size=(steps, 1)) ** 3
        for gradient, bound in (quadratic_loss, (lambda w, q, g=fixed: g[q], least)):
            radius = rng.uniform(0, 0.3)
            plain = limits.local_run(gradient, np.zeros(6), rate, steps).update
            pulled = limits.local_run(gradient, np.zeros(6), rate, steps, strength, radius).update
            ratio = np.linalg.norm(pulled) / np.linalg.norm(plain)
            assert bound - 1e-9 <= ratio <= 1 + 1e-9
            assert angle(pulled, plain) <= limits.turn(bound) + 1e-5


def test_the_bounds_are_reached():
    setting, strength = limits.SETTINGS[0], 0.4
    factor = 1 - strength * setting.rate
    steps = setting.rate, setting.steps, strength

    def ratio_and_turn(gradients):
        runs = [
            limits.local_run(lambda w, q: gradients[q], np.zeros(2), *steps[:2], pull, 0.0).update
            for pull in (0.0, strength)
        ]
        return np.linalg.norm(runs[1]) / np.linalg.norm(runs[0]), angle(*runs)

    # A constant gradient, against the sum of the powers in closed form.
    constant, _ = ratio_and_turn(np.ones((30, 2)))
    assert constant == pytest.approx((1 - factor**30) / (30 * strength * setting.rate), rel=1e-12)
    assert constant == pytest.approx(limits.least_ratio(*steps), rel=1e-9)
    # Gradients of the first step alone, and of the first and the last in the worst proportion.
    first = np.zeros((30, 2))
    first[0] = 1, 0
    least = factor**29
    # The first step sets off from the center: it is not pulled, all later ones are.
    assert ratio_and_turn(first)[0] == pytest.approx(least, rel=1e-12)
    first[29] = 0, math.sqrt(least)
    assert ratio_and_turn(first)[1] == pytest.approx(limits.turn(least), rel=1e-9)


def test_an_update_cut_to_the_largest_terms_is_the_projection_of_the_definition():
    update = np.array([3.0, -1.0, 2.0, 0.5, -4.0])
    gradient = np.array([0.1, 5.0, -1.0, 1.0, 0.0])
    # Terms .3, 5, 2 in the first layer and .5, 0 in the second; two and one are retained.
    cut = limits.sparsified(update, gradient, 0.4, [3, 2])
    np.testing.assert_array_equal(cut, [0, -1, 2, 0.5, 0])
    np.testing.assert_array_equal(limits.clipped(cut, 1.0), cut / math.sqrt(5.25))
    # The descent along the client's own mean gradient, -update, falls by cut's share of the norm.
    share = np.linalg.norm(cut) / np.linalg.norm(update)
    before, after = limits.clipped(update, 1.0) @ update, limits.clipped(cut, 1.0) @ update
    assert after == pytest.approx(share * before)


def test_noise_that_would_bring_the_same_accuracy_is_read_off_the_table():
    rows = [
        {"source_table": "1", "model": "m", "algorithm": name, "variable_value": value}
        | {"accuracy_mean": accuracy}
        for name, accuracies in (("DP-FedAvg", "50 70"), ("DP-FedAvg+BLUR+LUS", "60 80"))
        for value, accuracy in zip("28", accuracies.split(), strict=True)
    ]
    first, last = limits.needed(rows, lambda epsilons: [16 / e for e in epsilons])
    # Half of the way from noise 8 to noise 2 in logarithms is noise 4.
    assert (first["factor"], first["is_least"]) == (pytest.approx(2), 0)
    assert (last["factor"], last["is_least"]) == (pytest.approx(1), 1)


@pytest.mark.parametrize("widths", [(4, 3), (4, 5, 3)])
def test_gradients_are_those_of_the_loss(widths):
    rng = np.random.default_rng(0)
    network = messages.Network(widths)
    weights = network.start(rng) + 0.1 * rng.normal(size=sum(network.sizes))
    inputs, labels = rng.normal(size=(7, 4)), rng.integers(0, 3, 7)

    def loss(w):
        scores = network.outputs(w, inputs)[-1]
        return np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(7), labels])

    numeric = [
        (loss(weights + step) - loss(weights - step)) / 2e-6 for step in 1e-6 * np.eye(len(weights))
    ]
    np.testing.assert_allclose(network.gradient(weights, inputs, labels), numeric, atol=1e-8)


def test_messages_of_one_stage_are_measured_for_each_method(monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setitem(messages.WIDTHS, "small", (4, 3))
    labels = [rng.integers(0, 3, 8) for _ in range(5)]
    clients = messages.Clients([rng.normal(size=(8, 4)) for _ in range(5)], labels)
    rows = messages.measure("small", clients, 0.03, (0, 2))
    assert [(r["round"], r["method"]) for r in rows] == [
        (stage, method) for stage in (0, 2) for method in ("plain", *messages.METHODS)
    ]
    for row in rows:
        is_plain = row["method"] == "plain"
        assert row["factor"] == 1 if is_plain else row["factor_error"] > 0
        assert row["shortened_most"] <= row["shortened"] <= 1
        assert row["turned"] <= row["turned_most"]
    # A message never exceeds S, and steps this small all exceed it.
    assert all(row["useful_share"] <= 1 and row["share_longer"] == 1 for row in rows)
    value, error = messages.ratio(np.array([2.0, 4.0, 6.5]), np.array([1.0, 2.0, 3.0]))
    assert value == pytest.approx(12.5 / 6)
    residuals = np.array([2.0, 4.0, 6.5]) - 12.5 / 6 * np.array([1.0, 2.0, 3.0])
    assert error == pytest.approx(np.std(residuals, ddof=1) / math.sqrt(3) / 2)
