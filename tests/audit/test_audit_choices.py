"""The check of private choices: quiet as they are, loud without noise or with too little."""

import audit_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, telling

from fedjax_dp.audit.steps import check_choice
from fedjax_dp.clients import selection
from fedjax_dp.clients.selection import exact_choice, make_choice
from fedjax_dp.privacy.mechanisms.selection import select

pytestmark = floats

EPSILON = 2.0
NUMBERS = {"selection_epsilon": EPSILON, "loss_bound": 1.5}
# Two models that call everything by opposite names, and three records on which they are even but
# for one.
MODELS = {
    "b": jnp.zeros(2),
    "w": jnp.stack([jnp.eye(1, cases.NUM_FEATURES)[0], -jnp.eye(1, cases.NUM_FEATURES)[0]]),
}
BATCH = {
    "x": np.eye(1, cases.NUM_FEATURES, dtype=np.float32) * np.ones((3, 1), np.float32),
    "y": np.array([1.0, 1.0, 0.0], np.float32),
}


def checked(score="accuracy", **options):
    choice = make_choice(cases.model(), "private", score)
    return check_choice(choice, NUMBERS, MODELS, BATCH, jax.random.key(0), **options)


@telling
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_a_private_choice_holds_what_it_states(score):
    [result] = checked(score)
    assert not result.is_violated
    # It would see a good deal more: one record of three moves a score by 1/3, sensitivity is 1/2.
    assert result.allowed == pytest.approx(EPSILON) and result.measured > EPSILON / 5


def without_noise(key, scores, epsilon, sensitivity, *, is_offered):
    del key, epsilon, sensitivity
    return jnp.argmax(jnp.where(is_offered, scores, -jnp.inf)).astype(jnp.int32)


def with_a_sixth_of_it(key, scores, epsilon, sensitivity, **options):
    return select(key, scores, 6 * epsilon, sensitivity, **options)


@pytest.mark.parametrize("broken", [without_noise, with_a_sixth_of_it])
def test_a_choice_with_too_little_noise_is_found(monkeypatch, broken):
    monkeypatch.setattr(selection, "select", broken)
    [result] = checked()
    assert result.is_violated


def test_an_exact_choice_claims_nothing():
    exact = exact_choice(cases.model())
    assert check_choice(exact, NUMBERS, MODELS, BATCH, jax.random.key(0)) == []


@pytest.mark.parametrize("name", [n for n, unit in cases.private_pairs() if unit == "record"])
def test_what_is_checked_is_the_choice_that_an_algorithm_declares(name):
    algorithm = cases.build(name, cases.model(), "record")
    results = check_choice(
        algorithm.stages.choice, algorithm.hyper.algorithm, MODELS, BATCH, jax.random.key(0)
    )
    assert bool(results) == (name in ("r_dpcfl", "f_cdpfl"))
    assert not any(result.is_violated for result in results)


def test_too_little_to_compare_is_refused():
    with pytest.raises(ValueError, match="num_draws must be an integer of at least 1000"):
        checked(num_draws=10)
