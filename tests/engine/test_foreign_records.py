"""Records and rounds of foreign origin: nothing is charged or read by a number out of its range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import NUM_CLIENTS, make_data, make_model, private_trainer

from fedjax_dp import algorithms
from fedjax_dp.clients.client_data import ClientData, growing
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import Fate, PrivacyAccounting, RoundRecord, federation, population_of

DELTA = 1e-5
LAST = 4


def record_of(**changes):
    """A record of one round of two clients, changed."""
    fields = {
        "clients": np.array([[2, 5, -1]], np.int32),
        "fate": np.array([[Fate.CONTRIBUTED] * 2 + [Fate.EMPTY]], np.int8),
        "overflow": np.zeros(1, np.int32),
        "stage": np.array([LAST], np.int32),
        "is_released": np.ones(1, bool),
    }
    return RoundRecord(**{**fields, **changes})


@pytest.fixture(scope="module")
def bound():
    model = make_model()
    algorithm = algorithms.r_dpcfl(
        model,
        private_trainer(model),
        num_clients=NUM_CLIENTS,
        num_rounds=4,
        clusters=algorithms.ClusterCount(2),
        ends_with_choice=True,
    )
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    return federation(algorithm, population_of(make_data()), everyone)


FOREIGN = {
    "the last but one, by a negative number": {"stage": np.array([-1])},
    "the second, by a negative number": {"stage": np.array([-4])},
    "one beyond the last": {"stage": np.array([LAST + 1])},
    "half a stage": {"stage": np.array([0.5])},
    "a stage of true": {"stage": np.array([True])},
    "no stage for the round": {"stage": np.array([], np.int32)},
    "one stage for a round of two": {"stage": np.array([0, 1])},
    "a client that wraps": {"clients": np.array([[-2, 5, -1]])},
    "a client beyond the population": {"clients": np.array([[2, NUM_CLIENTS, -1]])},
    "half a client": {"clients": np.array([[2.5, 5, -1]])},
    "a client twice, who moves one release twice as far": {"clients": np.array([[2, 2, -1]])},
    "a client that took part without a number": {"clients": np.array([[2, -1, -1]])},
    "clients of a single round": {"clients": np.array([2, 5, -1])},
    "no clients, as floats": {"clients": np.zeros((1, 0)), "fate": np.zeros((1, 0), np.int8)},
    "fewer fates than slots": {"fate": np.array([[Fate.CONTRIBUTED]])},
    "a fate that there is not": {"fate": np.array([[1, 9, 0]])},
    "the numbers of no round": {"digest": np.zeros((0, 2), np.uint32)},
    "numbers in three words": {"digest": np.zeros((1, 3), np.uint32)},
    "numbers as floats": {"digest": np.zeros((1, 2))},
    **{
        f"{what} for the {name}": {name: value}
        for name in ("clients", "fate", "stage", "digest")
        for what, value in {
            "a key": jax.random.key(0),
            "a ragged list": [[1, 2], [3]],
            "a word": "two",
            "objects": [[None, 1]],
        }.items()
    },
    "no clients": {"clients": None},
}


@pytest.mark.parametrize("wrong", FOREIGN)
def test_a_record_that_is_not_of_this_federation_charges_nothing(bound, wrong):
    accounting = PrivacyAccounting(bound)
    name = next(iter(FOREIGN[wrong]))
    with pytest.raises(ValueError, match=f"{name} of a record must"):
        accounting.charge(record_of(**FOREIGN[wrong]))
    assert not np.any(accounting.epsilon({"record": DELTA})["record"])
    accounting.charge(record_of())
    paid = accounting.epsilon({"record": DELTA})["record"] > 0
    assert np.flatnonzero(paid).tolist() == [2, 5]


@pytest.mark.parametrize("form", ["disjoint", "cumulative"])
def test_growing_data_hold_records_of_their_own_client_alone(form):
    # Three clients of four records, side by side.
    growth = growing(2, 3, form)
    for round in (-(2**31), -2, -1, 0, 1, 2, 2**31 - 1):
        client = ClientData({}, jnp.int32(4), jnp.int32(4), jnp.int32(1), 4, round=round)
        seen = growth.view(client)
        start, size = int(seen.start), int(seen.size)
        assert start >= 4 and start + size <= 8
        assert (size > 0) == (round in (0, 1))
