"""Aggregators against NumPy: each is its mean, none depends on how it is streamed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by

from fedjax_dp.core import trees
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.server import (
    ModelChoice,
    gaussian_mean,
    mean_per_model,
    per_part,
    scaled_sum,
    trimmed_mean,
    uniform_mean,
    weighted_mean,
)

WEIGHTS = np.array([3.0, 0.0, 1.0, 5.0])
UPDATES = np.random.default_rng(0).normal(size=(4, 3))


def aggregate(aggregator, updates, weights=WEIGHTS):
    """Adds the contributions as an engine does and combines them."""
    state = aggregator.init(jax.tree.map(jnp.zeros_like, updates[0]))
    contributions = [
        aggregator.contribute(state, aggregator.numbers, update, sent_by(i, weight))
        for i, (update, weight) in enumerate(zip(updates, weights, strict=True))
    ]
    total = contributions[0]
    for contribution in contributions[1:]:
        total = trees.add(total, contribution)
    return aggregator.combine(state, aggregator.numbers, total, closed())[1:]


def rows():
    return [{"w": jnp.float32(u)} for u in UPDATES]


def test_weighted_mean():
    result, info = aggregate(weighted_mean(), rows())
    np.testing.assert_allclose(result["w"], np.average(UPDATES, axis=0, weights=WEIGHTS), rtol=1e-5)
    assert info["total_weight"] == 9


def test_uniform_mean():
    result, _ = aggregate(uniform_mean(), rows())
    np.testing.assert_allclose(result["w"], UPDATES.mean(axis=0), rtol=1e-5)


def test_scaled_sum_divides_by_its_constant():
    result, _ = aggregate(scaled_sum(8.0), rows())
    np.testing.assert_allclose(result["w"], UPDATES.sum(axis=0) / 8, rtol=1e-5)


@pytest.mark.parametrize("make", [weighted_mean, uniform_mean])
def test_the_mean_of_no_clients_is_zero(make):
    aggregator = make()
    state = aggregator.init(None)
    one = aggregator.contribute(state, {}, {"w": jnp.ones(3)}, sent_by(weight=2))
    _, result, _ = aggregator.combine(state, {}, trees.zeros_like(one), closed())
    np.testing.assert_array_equal(result["w"], 0.0)


@pytest.mark.parametrize("is_weighted", [True, False])
def test_mean_per_model(is_weighted):
    """Model 2 is chosen by no client and stays where it is."""
    choices = np.array([0, 1, 0, 1])
    updates = [ModelChoice(jnp.int32(c), r) for c, r in zip(choices, rows(), strict=True)]
    result, info = aggregate(mean_per_model(3, is_weighted=is_weighted), updates)
    weights = WEIGHTS if is_weighted else np.ones(4)
    for m in range(2):
        own = choices == m
        expected = np.average(UPDATES[own], axis=0, weights=weights[own])
        np.testing.assert_allclose(result["w"][m], expected, rtol=1e-5)
    np.testing.assert_array_equal(result["w"][2], 0.0)
    totals = [weights[choices == m].sum() for m in range(3)]
    np.testing.assert_allclose(info["weight_per_model"], totals)


def test_parts_are_aggregated_each_in_its_own_way():
    updates = [{"a": row, "b": {"w": 2 * row["w"]}} for row in rows()]
    result, info = aggregate(per_part({"a": weighted_mean(), "b": scaled_sum(10.0)}), updates)
    mean = np.average(UPDATES, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(result["a"]["w"], mean, rtol=1e-5)
    np.testing.assert_allclose(result["b"]["w"], 2 * UPDATES.sum(axis=0) / 10, rtol=1e-5)
    assert info["a_total_weight"] == 9


def test_a_private_part_is_refused():
    """One claim cannot cover a mixture."""
    with pytest.raises(ValueError, match=r"parts\['a'\] must add no noise .*, got 'noise'"):
        per_part({"a": gaussian_mean(1.0, 1.0, 1.0)})
    with pytest.raises(ValueError, match=r"parts\['s'\] must be a Summed aggregator"):
        per_part({"s": trimmed_mean()})
    encoding = uniform_mean()._replace(encode=lambda *arguments: arguments[2])
    with pytest.raises(ValueError, match=r"parts\['e'\] must .* encode nothing.*got 'an enc"):
        per_part({"e": encoding})


def test_only_private_means_claim_anything():
    for aggregator in (weighted_mean(), uniform_mean(), scaled_sum(2.0), mean_per_model(2)):
        assert aggregator.claim is None
    assert isinstance(gaussian_mean(1.0, 1.0, 1.0).claim, ClientClaim)
