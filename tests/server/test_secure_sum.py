"""Secure aggregation written as an aggregator: masks of pairs cancel in the sum, modulo 2^16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Numbers, Training
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core.keys import fold
from fedjax_dp.engine import Cohort, Examples, Fate, Layout
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.server.base import Stacked, Summed, stateless

pytestmark = floats

MODULUS, DIMENSION, SLOTS = 2**16, 5, 8
KEY = jax.random.key(0)
IDS = np.array([6, 2, 9, 4, 0, 7, 0, 0], np.int32)
UPDATES = np.random.default_rng(0).integers(0, MODULUS, (10, DIMENSION))


def masks_of(client, others, is_there, key):
    """A client's masks with others; each pair draws one mask, which one adds and one subtracts."""

    def with_one(other, is_there):
        pair = fold(key, jnp.minimum(client, other), jnp.maximum(client, other))
        mask = jax.random.bits(pair, (DIMENSION,), jnp.uint32)
        mask = jnp.where(client < other, mask, -mask)
        return jnp.where(is_there & (client != other), mask, 0)

    return jnp.sum(jax.vmap(with_one)(others, is_there), axis=0)


def secure_sum(kind):
    def contribute(state, numbers, update, sender):
        return update

    def encode(state, numbers, contribution, sender):
        roster = sender.roster
        mask = masks_of(sender.index, roster.clients, roster.is_announced, sender.public_key)
        return (contribution.astype(jnp.uint32) + mask) % MODULUS

    def combine(state, numbers, total, close):
        clients, key = close.roster.clients, close.public_key
        total = jnp.sum(total, axis=0) if kind is Stacked else total
        # A client whose update was not finite sent zeros behind its masks.
        has_sent = jnp.isin(close.fates, jnp.array([Fate.CONTRIBUTED, Fate.NOT_FINITE]))
        has_dropped = close.roster.is_announced & ~has_sent
        left = jax.vmap(lambda client: masks_of(client, clients, has_dropped, key))(clients)
        left = jnp.sum(jnp.where(has_sent[:, None], left, 0), axis=0)
        return state, (total - left) % MODULUS, {"masked": total % MODULUS}

    return kind(stateless, contribute, combine, encode=encode)


def played(fates, kind=Summed):
    """One compiled round in which each client sends its line of `UPDATES`."""

    def client(message, own, client, hyper, key):
        update = jnp.asarray(UPDATES, jnp.float32)[client.index]
        # Client 9 computes what is not finite.
        update = jnp.where((client.index == 9) & hyper.algorithm["fails"], jnp.nan, update)
        return ClientOutput(update, jnp.float32(1), own)

    algorithm = FederatedAlgorithm(
        name="secure_sum",
        init=lambda key: (),
        broadcast=lambda server, client: (),
        client=client,
        aggregator=secure_sum(kind),
        server_step=lambda server, total, hyper, round, key: (server, {"total": total}),
        training=Training(LocalConfig(0.1, 1, 1), lambda size, config: jnp.int32(1)),
        numbers=Numbers({"fails": Fate.NOT_FINITE in fates}),
    )
    before = np.where(np.array(fates) == Fate.NOT_FINITE, Fate.CONTRIBUTED, fates).astype(np.int8)
    examples = Examples({}, np.zeros(SLOTS, np.int32), np.ones(SLOTS, np.int32), is_by_slot=True)
    state = SimulationState((), (), None, jnp.int32(3))
    run = jax.jit(
        lambda cohort: run_round(
            algorithm, Layout(chunk=2), state, algorithm.hyper, examples, cohort, KEY
        )
    )
    _, record, info = run(Cohort(jnp.asarray(IDS), jnp.asarray(before), jnp.int32(0)))
    np.testing.assert_array_equal(record.fate, fates)
    return np.asarray(info.server["total"]), np.asarray(info.aggregator["masked"])


@pytest.mark.parametrize("kind", [Summed, Stacked])
@pytest.mark.parametrize(
    "third", [Fate.CONTRIBUTED, Fate.DROPPED, Fate.LATE, Fate.NOT_FINITE, Fate.UNANNOUNCED]
)
def test_masks_of_pairs_leave_the_plain_sum(third, kind):
    fates = [Fate.CONTRIBUTED] * 2 + [third] + [Fate.CONTRIBUTED] * 3 + [Fate.EMPTY] * 2
    total, masked = played(fates, kind)
    plain = UPDATES[IDS[np.array(fates) == Fate.CONTRIBUTED]].sum(axis=0) % MODULUS
    np.testing.assert_array_equal(total, plain)
    # Of a client that dropped out, the others' masks are in the sum until they are removed.
    assert np.any(masked != plain) == (third in (Fate.DROPPED, Fate.LATE))


def test_a_message_reveals_nothing_about_its_update():
    """One client's message is its update behind a mask that is uniform for fixed others."""
    alone = [Fate.CONTRIBUTED] + [Fate.DROPPED] + [Fate.EMPTY] * 6
    total, masked = played(alone)
    np.testing.assert_array_equal(total, UPDATES[IDS[0]])
    assert np.all(masked != UPDATES[IDS[0]])
