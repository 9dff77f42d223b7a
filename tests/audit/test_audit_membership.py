"""Membership attack: it finds what was learned by heart, and nothing where nothing was learned."""

import audit_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats
from scipy import stats

from fedjax_dp.audit.membership import attack_features, attack_model, membership_attack
from fedjax_dp.models.base import Model

pytestmark = floats


def records(size, seed, num_features=cases.NUM_FEATURES):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, num_features)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 2, size).astype(np.float32)}


def fitted(model, examples, num_steps=300):
    """Learns random labels by heart, by plain gradient descent."""

    def total(params):
        return jnp.mean(model.losses(params, examples)[0])

    def step(params, _):
        gradient = jax.grad(total)(params)
        return jax.tree.map(lambda p, g: p - 1.0 * g, params, gradient), None

    return jax.lax.scan(step, model.init(jax.random.key(0)), None, length=num_steps)[0]


def test_a_memorising_model_reveals_its_members():
    # Eight weights an example: members get margins that others get by three standard deviations.
    wide = 400
    model = Model.from_functions(
        lambda key: jnp.zeros(wide),
        lambda params, x: x @ params,
        loss="sigmoid_binary_cross_entropy",
    )
    members, others = records(50, 0, wide), records(200, 1, wide)
    result = attack_model(model, fitted(model, members), members, others, np.random.default_rng(0))
    assert result.num_examples == 50
    assert result.accuracy > 0.8 and result.auc > 0.85
    low, high = result.accuracy_interval
    assert 0.6 < low < result.accuracy < high


def test_a_model_of_other_records_reveals_no_members():
    model = cases.model()
    params = fitted(model, records(50, 2))
    result = attack_model(model, params, records(800, 0), records(800, 1), np.random.default_rng(0))
    low, high = result.accuracy_interval
    assert low < 0.5 < high
    # The area under the curve of 400 members and 400 others without a difference.
    assert result.auc == pytest.approx(0.5, abs=4 * np.sqrt(801 / (12 * 400 * 400)))


def test_the_attack_finds_what_the_best_threshold_finds():
    # Two normal distributions two standard deviations apart: Φ(1) of all answers can be right.
    rng = np.random.default_rng(0)
    members, others = rng.normal(2, 1, (4000, 1)), rng.normal(0, 1, (5000, 1))
    result = membership_attack(members, others, rng)
    best = stats.norm.cdf(1)
    assert result.num_examples == 4000
    assert result.accuracy == pytest.approx(best, abs=4 * np.sqrt(best * (1 - best) / 4000))
    assert result.auc == pytest.approx(stats.norm.cdf(np.sqrt(2)), abs=0.02)
    found = stats.norm.sf(stats.norm.isf(0.01) - 2)
    assert result.true_positive_rate == pytest.approx(found, abs=0.08)


def test_features_are_outputs_in_order_and_losses():
    model = Model.from_functions(
        lambda key: {},
        lambda params, x: x,
        loss=lambda outputs, batch: jnp.where(batch["y"] > 0, jnp.nan, outputs[:, 0]),
    )
    x = np.tile(np.array([[1.0, 3.0, 2.0]], np.float32), (700, 1))
    features = attack_features(model, {}, {"x": x, "y": np.arange(700) % 2})
    assert features.shape == (700, 5)
    np.testing.assert_array_equal(features[:, 2:], np.tile([3.0, 2.0, 1.0], (700, 1)))
    np.testing.assert_array_equal(features[:, 0], np.where(np.arange(700) % 2, 0.0, 1.0))
    np.testing.assert_allclose(features[:, 1], np.log(features[:, 0] + 1e-6), atol=1e-12)


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="members, others must hold four examples each"):
        membership_attack(np.zeros((3, 1)), np.zeros((9, 1)), np.random.default_rng(0))
    with pytest.raises(ValueError, match="features must be finite"):
        membership_attack(np.full((9, 1), np.nan), np.zeros((9, 1)), np.random.default_rng(0))
