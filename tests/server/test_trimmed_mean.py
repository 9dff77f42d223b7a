"""The trimmed mean against sorting by hand, and what it withstands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from oracles.trimmed_mean import trimmed_mean as by_hand

from fedjax_dp.server import trimmed_mean


def combined(updates, is_real, share, start=0.1):
    aggregator = trimmed_mean(start)
    contribute = jax.vmap(lambda u: aggregator.contribute((), {}, u, sent_by()))
    stack, close = contribute({"w": jnp.asarray(updates)}), closed(range(len(is_real)), is_real)
    numbers = {"trimmed_share": jnp.float32(share)}
    _, aggregate, info = aggregator.combine((), numbers, stack, close)
    return aggregate["w"], int(info["num_trimmed"])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.3, 0.49])
@pytest.mark.parametrize("count", [1, 2, 5, 10, 20])
def test_each_coordinate_is_trimmed_on_its_own(count, share):
    rng = np.random.default_rng(count)
    updates = rng.normal(size=(count, 3, 2)).astype(np.float32)
    # Empty slots hold zeros, between the others.
    is_real = np.zeros(25, bool)
    is_real[np.sort(rng.permutation(25)[:count])] = True
    slots = np.zeros((25, 3, 2), np.float32)
    slots[is_real] = updates
    found, _ = combined(slots, is_real, share)
    expected = by_hand(updates.reshape(count, -1), share).reshape(3, 2)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("share, count, trimmed", [(0.3, 10, 3), (0.29, 100, 29), (0.1, 30, 3)])
def test_a_share_that_is_whole_in_decimals_is_trimmed_whole(share, count, trimmed):
    assert combined(np.ones((count, 1), np.float32), np.ones(count, bool), share)[1] == trimmed


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_share_of_one_half_or_more_leaves_the_median(count):
    """Traced numbers cannot be refused: the result is then the median's own."""
    updates = np.arange(count, dtype=np.float32)[:, None]
    found, _ = combined(updates, np.ones(count, bool), 0.9)
    np.testing.assert_allclose(found, [np.median(updates)])


def test_the_mean_of_no_clients_is_zero():
    found, trimmed = combined(np.ones((4, 2), np.float32), np.zeros(4, bool), 0.25)
    np.testing.assert_array_equal(found, 0.0)
    assert trimmed == 0


def test_as_many_liars_as_are_trimmed_move_it_no_further_than_honest_clients_lie():
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(8, 5)).astype(np.float32)
    for lie in (1e30, -1e30):
        updates = np.concatenate([honest, np.full((2, 5), lie, np.float32)])
        all_clients = np.ones(10, bool)
        found, trimmed = combined(updates, all_clients, 0.2)
        assert trimmed == 2
        assert np.all((honest.min(axis=0) <= found) & (found <= honest.max(axis=0)))
        moved, _ = combined(updates, all_clients, 0.1)
        assert np.all(np.abs(moved) > 1e28), "one more than are trimmed takes it away"
