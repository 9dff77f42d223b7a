"""Who joins a round: draws that follow the key, slots, and cohorts that are refused."""

import dp_accounting
import jax
import numpy as np
import pytest

from fedjax_dp.data import participants, sampling

GAUSSIAN = dp_accounting.GaussianDpEvent(1.0)


def test_cohorts_differ_by_round_and_follow_the_key():
    chosen = participants.participation(sampling.poisson(), 50, 10)
    key = jax.random.key(0)
    cohorts = [
        tuple(np.asarray(d.indices)[np.asarray(d.is_real)].tolist())
        for d in (chosen.draw(key, r) for r in range(6))
    ]
    assert len(set(cohorts)) == 6
    again = chosen.draw(key, 2)
    assert tuple(np.asarray(again.indices)[np.asarray(again.is_real)].tolist()) == cohorts[2]


@pytest.mark.parametrize(
    "sampler, cohort_size, capacity",
    [
        (sampling.poisson(), 10.5, 50),
        (sampling.poisson(20), 10.5, 20),
        (sampling.fixed_size(), 10, 10),
        (sampling.full_participation(), None, 50),
        (sampling.full_participation(), 10, 50),
        (sampling.cyclic(), 7, 7),
    ],
)
def test_slots_of_a_cohort(sampler, cohort_size, capacity):
    chosen = participants.participation(sampler, 50, cohort_size)
    assert chosen.capacity == capacity
    drawn = chosen.draw(jax.random.key(0), 0)
    assert drawn.indices.shape == drawn.is_real.shape == (capacity,)
    assert chosen.event(GAUSSIAN) == sampler.event(GAUSSIAN, 50, chosen.cohort_size)


@pytest.mark.parametrize(
    "sampler, num_clients, cohort_size, message",
    [
        (sampling.poisson(), 5, 0, "cohort_size must be above 0"),
        (sampling.poisson(), 5, 6, "cohort_size must be at most the population of 5"),
        (sampling.fixed_size(), 5, 2.5, "cohort_size must be an integer"),
        (sampling.shuffled(), 5, 2, "sampler must draw clients independently"),
        (sampling.shuffled(only_whole=True), 5, 2, "sampler must draw clients independently"),
    ],
)
def test_bad_cohorts_are_refused(sampler, num_clients, cohort_size, message):
    with pytest.raises(ValueError, match=message):
        participants.participation(sampler, num_clients, cohort_size)
