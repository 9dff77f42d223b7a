"""Draws of all steps at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later

from fedjax_dp.data import sampling

_SIZE, _BATCH, _STEPS = 7, 3, 8
_SAMPLERS = {
    "shuffled": sampling.shuffled(),
    "whole": sampling.shuffled(only_whole=True),
    "poisson": sampling.poisson(),
    "cut": sampling.poisson(4),
    "fixed": sampling.fixed_size(),
    "cyclic": sampling.cyclic(),
    "separated": sampling.min_separated(2),
    "full": sampling.full_participation(),
}


@pytest.mark.parametrize("name", later(_SAMPLERS, but=["shuffled", "poisson"]))
def test_draws_ahead_are_those_of_steps(name):
    sampler, key = _SAMPLERS[name], jax.random.key(5)
    batch = np.float32(_BATCH) if sampler.varies else np.int32(_BATCH)
    batch = np.asarray(sampler.nominal_size(np.int32(_SIZE), batch))
    fixed = _SIZE, batch, _SIZE, sampler.capacity(_SIZE, _BATCH)
    ahead = jax.jit(partial(sampler.draws_ahead, key, _STEPS, *fixed))()

    def step(state, i):
        return sampler.draw(state, key, i, *fixed)

    _, one_by_one = jax.jit(lambda: jax.lax.scan(step, sampler.init(_SIZE), jnp.arange(_STEPS)))()
    jax.tree.map(np.testing.assert_array_equal, ahead, one_by_one)
    if name not in ("full", "cyclic"):
        assert len(np.unique(ahead.indices, axis=0)) > 1


def test_many_draws_are_not_made_ahead():
    make = partial(sampling.poisson().draws_ahead, jax.random.key(0))
    assert make(0, 4, np.float32(2), 4, 4) is None
    assert make(1, 2000, np.float32(2), 2000, 99) is None
    assert make(1000, 900, np.float32(2), 900, 99) is None
