"""Canaries through a model's own loss, and sums that wrap: quiet as claimed, loud at half."""

import functools

import audit_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, slow, telling

from fedjax_dp.audit.canaries import MARK, plant_clients
from fedjax_dp.audit.canary_records import OTHER, plant_losses
from fedjax_dp.audit.runs import audit, run_audit
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models import registry
from fedjax_dp.privacy.mechanisms.distributed import discrete_mechanism, make_plan
from fedjax_dp.server.private import discrete_mean

pytestmark = [pytest.mark.xdist_group("audited losses"), floats]

# Four clients of six images, of which a step reads all; the noise makes ε about 1 at δ = 0.1.
NUMBERS = cases.NUMBERS._replace(batch_size=12.0, noise_multiplier=2.0, clip_norm=0.3)
SHAPE, NUM_CLASSES = (4, 4, 1), 3


def images() -> FederatedData:
    rng = np.random.default_rng(0)
    return FederatedData.from_clients(
        [
            {
                "x": rng.random((6, *SHAPE)).astype(np.float32),
                "y": rng.integers(0, NUM_CLASSES, 6).astype(np.int32),
            }
            for _ in range(cases.NUM_CLIENTS)
        ]
    )


def network(name="logistic_regression"):
    return registry.build(name, {"x": jax.ShapeDtypeStruct(SHAPE, "float32")}, NUM_CLASSES)


def planted_in(name, model, numbers=NUMBERS, num_canaries=1, relation="zero_out"):
    def make(model):
        trainer = dp_sgd_trainer(model, numbers, sampler=cases.FULL)
        return cases.build(name, model, "record", trainer)

    return cases.plant_in(
        plant_losses, make, num_canaries=num_canaries, on=model, store=images(), relation=relation
    )


def with_less_noise(algorithm, share):
    hyper = algorithm.hyper
    local = hyper.local._replace(noise_multiplier=share * hyper.local.noise_multiplier)
    own = dict(hyper.algorithm)
    if algorithm.stages.choice is not None:
        own["selection_epsilon"] = own["selection_epsilon"] / share
    return algorithm.with_hyper(hyper._replace(local=local, algorithm=own))


def bounds_of(planted, num_runs, num_rounds, running=None, key=0, accountant="pld"):
    runs = run_audit(
        planted,
        jax.random.key(key),
        num_runs=num_runs,
        num_rounds=num_rounds,
        execution=cases.EXECUTION,
        running=running,
    )
    return audit(runs, cases.DP_DELTA, accountant=accountant)


# Algorithm, model, runs; one that sees six numbers in three rounds must learn from more of them.
CASES = {
    "a CNN under dp_sgd": ("dp_sgd", "thesis_cnn", 400),
    "fedpi": ("fedpi", "logistic_regression", 400),
    "ditto": ("ditto", "logistic_regression", 400),
    "choices and updates of r_dpcfl": ("r_dpcfl", "logistic_regression", 600),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=telling if "CNN" in case else slow) for case in CASES],
)
def test_bounds_are_below_their_claims_and_above_them_at_half_the_noise(case):
    name, model, num_runs = CASES[case]
    planted = planted_in(name, network(model))
    honest = bounds_of(planted, num_runs, 3)
    quiet = bounds_of(planted, num_runs, 3, with_less_noise(planted.algorithm, 0.5))
    for result in (*honest, *quiet):
        print(case, result.method, result.dp_delta, result.epsilon_lower, result.epsilon_claimed)
    assert not any(result.is_violated for result in honest)
    assert any(result.is_violated for result in quiet)


def test_canaries_are_copies_with_a_wrong_label():
    planted = planted_in("dp_sgd", network(), num_canaries=3, relation="replace_one")
    examples, mark = planted.data.examples, planted.data.examples[MARK]
    np.testing.assert_array_equal(planted.data.sizes, [7, 7, 7, 6])
    assert sorted(mark[mark >= 0]) == [0, 1, 2]
    ordinary = mark == -1
    np.testing.assert_array_equal(examples["y"][ordinary], examples[OTHER][ordinary])
    assert np.all(examples["y"][~ordinary] != examples[OTHER][~ordinary])
    for row in np.flatnonzero(~ordinary):
        same = (examples["x"] == examples["x"][row]).all(axis=(1, 2, 3)) & ordinary
        assert same.sum() == 1 and examples["y"][same] == examples[OTHER][row]


def test_what_has_no_labels_is_not_exchanged():
    data = FederatedData({"x": np.ones((4, 3), np.float32)}, np.array([0, 2, 4]))
    with pytest.raises(ValueError, match="data must hold integer labels of at least two classes"):
        make = functools.partial(cases.build, "dp_sgd", unit="record")
        cases.plant_in(plant_losses, make, store=data, relation="replace_one")


@telling
def test_without_noise_a_score_is_the_clipped_gradient_along_itself():
    silent = NUMBERS._replace(noise_multiplier=0.0)
    planted = planted_in("dp_sgd", network(), silent)
    runs = run_audit(
        planted, jax.random.key(0), num_runs=8, num_rounds=1, execution=cases.EXECUTION
    )
    seen, included = runs.seen[:, 0, 0], runs.is_included[:, 0]
    assert 0 < included.sum() < 8
    # Learning rate 0.1, clip norm 0.3, seven records in the client's batch.
    moved = seen[included].mean() - seen[~included].mean()
    assert moved == pytest.approx(0.1 * 0.3 / 7, rel=1e-3)
    assert seen[included].std() + seen[~included].std() < 1e-7


# Sums of integers that wrap around.

COUNT = 12


def wrapping_plan(share=1.0, num_deviations=1.8):
    """A lattice that holds a sum of clients within 1.8 of its standard deviations."""
    size = cases.NUM_FEATURES + 1
    plan = make_plan(size, 0.5, 1.2, num_clients=COUNT, bits=12, num_deviations=num_deviations)
    return plan._replace(
        noise_stddev=share * plan.noise_stddev, granularity=share * plan.granularity
    )


def wrapping_mean(share=1.0):
    structure = jax.eval_shape(cases.model().init, jax.random.key(0))
    honest = discrete_mean(structure, wrapping_plan(), COUNT)
    return discrete_mean(structure, wrapping_plan(share), COUNT)._replace(claim=honest.claim)


def wrapping(share=1.0):
    """Clients that learn next to nothing, so that it is noise and canary that wrap."""
    pool, model = cases.data().examples, cases.model()
    trainer = local_trainer(model, LocalConfig(learning_rate=1e-4, batch_size=4, num_steps=1))
    mean = wrapping_mean(share)
    algorithm = cases.build("dp_fedavg", model, "client", trainer, aggregator=mean)
    data = FederatedData({k: a[:COUNT] for k, a in pool.items()}, np.arange(COUNT + 1))
    return cases.plant_in(plant_clients, algorithm, store=data)


def wrapped_shares(plan, num_rounds=1000):
    """The share of entries, and of rounds with one, in which noise alone is beyond the integers."""
    structure = jax.eval_shape(cases.model().init, jax.random.key(0))
    mechanism = discrete_mechanism(structure, plan)
    update = jax.tree.map(lambda s: jnp.zeros(s.shape), structure)

    @jax.jit
    @jax.vmap
    def messages(key):
        public, *own = jax.random.split(key, COUNT + 1)
        return jnp.stack([mechanism.encode(public, k, update) for k in own])

    sent = np.asarray(messages(jax.random.split(jax.random.key(0), num_rounds))).astype(np.int64)
    half = 2 ** (plan.bits - 1)
    signed = np.where(sent >= half, sent - 2**plan.bits, sent)
    is_beyond = np.abs(signed.sum(axis=1)) > half
    return is_beyond.mean(), is_beyond.any(axis=1).mean()


@slow
def test_bounds_hold_where_sums_wrap_around_and_fail_at_half_the_noise():
    planted = wrapping()
    honest = bounds_of(planted, 3000, 1, accountant="rdp")
    quiet = bounds_of(planted, 3000, 1, wrapping(0.5).algorithm, accountant="rdp")
    for result in (*honest, *quiet):
        print("wraps", result.method, result.dp_delta, result.epsilon_lower, result.epsilon_claimed)
    for share in (1.0, 0.5):
        of_entries, of_rounds = wrapped_shares(wrapping_plan(share))
        print("wraps", share, "entries", of_entries, "rounds", of_rounds)
        assert of_entries > 0.002 and of_rounds > 0.15
    assert not any(result.is_violated for result in honest)
    assert any(result.is_violated for result in quiet)
