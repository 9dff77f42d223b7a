"""Clip, sensitivity, noise and event of a mechanism belong together."""

import math

import chex
import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from scipy import stats

from fedjax_dp.privacy import mechanisms, sensitivities
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms import clipping

pytestmark = floats

MAKERS = {"gaussian": mechanisms.gaussian, "laplace": mechanisms.laplace}

NOISED = [
    (name, relation, max_weight)
    for name in MAKERS
    for relation in ("add_remove", "replace_one")
    for max_weight in (1.0, 2.5)
]
QUICK = [("gaussian", "add_remove", 2.5), ("laplace", "replace_one", 2.5)]


@pytest.mark.parametrize(("name", "relation", "max_weight"), later(NOISED, but=QUICK, mark=telling))
def test_noise_is_the_events_multiplier_times_the_largest_contribution(name, relation, max_weight):
    clip_norm, z = 0.3, 1.7
    mechanism = MAKERS[name](clip_norm, z, relation=relation, max_weight=max_weight)
    # The largest weighted contribution, measured: one coordinate, where all norms agree.
    clipped, _ = mechanism.clip(jnp.asarray([1e6]))
    largest = max_weight * float(clipped[0])
    draws = np.asarray(mechanism.add_noise(jax.random.key(0), jnp.zeros(200_000)))
    law = stats.norm if name == "gaussian" else stats.laplace
    expected = mechanism.event().noise_multiplier * largest
    assert stats.kstest(draws, law(scale=expected).cdf).pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(draws, law(scale=wrong * expected).cdf).pvalue < 1e-4
    np.testing.assert_allclose(draws.std(), mechanism.noise_stddev, rtol=0.01)


def test_weights_enter_the_sensitivity_of_a_weighted_sum():
    # Known failure elsewhere: noise made for uniform weights under a weighted mean.
    uniform, weighted = (mechanisms.gaussian(1.0, 2.0, max_weight=w) for w in (1.0, 7.0))
    assert float(weighted.noise_stddev) == 7 * float(uniform.noise_stddev)
    rng = np.random.default_rng(0)
    vectors, weights = rng.normal(size=(6, 5)), np.array([7.0, 1, 2, 3, 0.5, 4])
    clipped = np.stack([np.asarray(weighted.clip(jnp.asarray(v))[0]) for v in vectors])
    total = weights @ clipped
    for i in range(6):
        without = np.delete(weights, i) @ np.delete(clipped, i, axis=0)
        moved = np.linalg.norm(total - without)
        assert moved <= float(weighted.sensitivity.l2) * (1 + 1e-6)
    assert np.linalg.norm(total - weights[1:] @ clipped[1:]) > float(uniform.sensitivity.l2)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("relation,factor", [("add_remove", 1), ("replace_one", 2)])
def test_laplace_scale_is_not_inverted_in_the_accountant(multiplier, relation, factor):
    # One release with scale b·C has δ(ε) = 1 − exp((ε − factor/b)/2) below ε = factor/b, 0 above.
    event = mechanisms.laplace(3.0, multiplier, relation=relation).event()
    pure = factor / multiplier
    ledger = Ledger(relation=relation)
    ledger.charge(event)
    # The largest order of the accountant is 1024, so that δ leaves its trace in ε.
    trace = math.log(1e12) / 1023
    assert 0.9 * pure <= ledger.epsilon(1e-12)[0] <= pure + trace
    if relation == "add_remove":
        exact = 1 - math.exp((0.5 * pure - pure) / 2)
        assert ledger.delta(0.5 * pure, "pld")[0] == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("method", ["global", "per_layer"])
def test_gaussian_uses_the_clipping_that_it_names(method):
    tree = {"a": jnp.full(4, 3.0), "b": jnp.full(4, 1e-3)}
    mechanism = mechanisms.gaussian(1.0, 1.0, method=method)
    expected, _ = clipping.METHODS[method](tree, 1.0)
    chex.assert_trees_all_equal(mechanism.clip(tree)[0], expected)


def test_mechanisms_compile_with_traced_numbers_and_never_recompile():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def release(key, rows, clip_norm, noise_multiplier):
        mechanism = mechanisms.gaussian(clip_norm, noise_multiplier)
        clipped, _ = jax.vmap(mechanism.clip)(rows)
        return mechanism.add_noise(key, clipped.sum(axis=0))

    rows = jnp.ones((3, 4))
    for clip_norm, z in [(1.0, 0.0), (0.1, 2.0)]:
        out = release(jax.random.key(0), rows, clip_norm, z)
        chex.assert_tree_all_finite(out)
    np.testing.assert_allclose(release(jax.random.key(0), rows, 1.0, 0.0), 1.5, rtol=1e-6)


def test_an_event_is_never_made_from_traced_numbers():
    def traced(z):
        mechanisms.gaussian(1.0, z).event()
        return z

    with pytest.raises(ValueError, match="noise_multiplier must be concrete"):
        jax.jit(traced)(1.0)


def test_noise_behind_no_sensitivity_is_refused():
    for missing in (None, 1.0):
        with pytest.raises(ValueError, match=r"noise needs a stated Sensitivity.*clip every"):
            sensitivities.noise_stddev(missing, 1.0)


def test_l1_clipping_matches_float64():
    rng = np.random.default_rng(0)
    tree = {"a": jnp.asarray(rng.normal(size=50), jnp.float32), "b": jnp.asarray(rng.normal())}
    flat = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in tree.values()])
    clipped, norm = clipping.clip_by_l1_norm(tree, 2.0)
    np.testing.assert_allclose(norm, np.abs(flat).sum(), rtol=1e-6)
    got = np.concatenate([np.ravel(x) for x in clipped.values()])
    np.testing.assert_allclose(got, flat * 2.0 / np.abs(flat).sum(), rtol=1e-5)
    clipped, norm = clipping.clip_by_l1_norm({"a": jnp.asarray([np.nan, 1.0])}, 2.0)
    assert np.isinf(norm) and np.all(clipped["a"] == 0)
    clipped, _ = clipping.clip_by_l1_norm({"a": jnp.zeros(3)}, 2.0)
    np.testing.assert_array_equal(clipped["a"], 0)


def test_events_are_those_of_dp_accounting():
    assert mechanisms.gaussian(5.0, 1.5).event() == dpa.GaussianDpEvent(1.5)
    assert mechanisms.laplace(5.0, 1.5).event() == dpa.LaplaceDpEvent(1.5)
