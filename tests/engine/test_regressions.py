"""Mistakes that were made once, each kept from coming back."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import telling

import fedjax_dp as fdp
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server import discrete_mean

KEY = jax.random.key(0)
NUM_CLIENTS = 11


def _data(size=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_CLIENTS * size, 3)).astype(np.float32)
    return fdp.FederatedData(
        {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}, np.arange(NUM_CLIENTS + 1) * size
    )


def _model():
    return fdp.Model.from_functions(
        lambda key: {"w": jnp.zeros((3, 2))},
        lambda params, x: x @ params["w"],
        loss="softmax_cross_entropy",
    )


def _trainer(**options):
    return fdp.local_trainer(_model(), fdp.LocalConfig(batch_size=2), **options)


@pytest.mark.parametrize(
    ("sampler", "cohort"), [(fdp.cyclic(), 10), (fdp.fixed_size(), 9), (fdp.min_separated(2), 5)]
)
def test_shares_of_noise_are_counted_against_the_smallest_cohort(sampler, cohort):
    plan = make_plan(6, 1.0, 1.0, num_clients=10, bits=20)
    algorithm = fdp.fedavg(
        _model(),
        _trainer(),
        aggregator=discrete_mean({"w": jax.ShapeDtypeStruct((3, 2), jnp.float32)}, plan, 10),
    )
    with pytest.raises(ValueError, match=r"must (draw|give the updates of at least) 10 clients"):
        fdp.simulation(algorithm, _data(), fdp.participation(sampler, NUM_CLIENTS, cohort))


@telling
def test_an_empty_poisson_cohort_is_noised_where_cohorts_are_streamed():
    algorithm = fdp.dp_fedavg(
        _model(),
        _trainer(),
        aggregator=fdp.gaussian_mean(clip_norm=1.0, noise_multiplier=1.0, expected_cohort_size=1),
    )
    rarely = fdp.participation(fdp.poisson(), NUM_CLIENTS, 1e-6)
    states = []
    for placement in ("host", "device"):
        execution = fdp.ExecutionConfig(placement=placement)
        run = fdp.simulation(algorithm, _data(), rarely, execution)
        state, record, _ = run.run(run.init(KEY), KEY, 2)
        assert record.num_drawn.tolist() == [0, 0]
        states.append(np.asarray(state.server.params["w"]))
    assert np.abs(states[0]).min() > 0
    np.testing.assert_array_equal(states[0], states[1])


@telling
def test_accounts_read_the_numbers_that_ran():
    algorithm = fdp.dp_fedavg(
        _model(),
        _trainer(),
        aggregator=fdp.gaussian_mean(clip_norm=1.0, noise_multiplier=2.0, expected_cohort_size=5),
    )
    run = fdp.simulation(
        algorithm, _data(), fdp.participation(fdp.full_participation(), NUM_CLIENTS)
    )
    account = fdp.PrivacyAccounting(run)
    quieter = run.hyper._replace(aggregator={**run.hyper.aggregator, "noise_multiplier": 0.5})
    _, record, _ = run.run(run.init(KEY), KEY, 1, quieter)
    account.charge(record, quieter)
    reference = dp_accounting.rdp.RdpAccountant()
    reference.compose(dp_accounting.GaussianDpEvent(0.5))
    spent = account.epsilon({"client": 1e-5})["client"][0]
    assert spent == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_every_kind_of_event_is_asked_for_before_rounds_run():
    """One client's batch holds all of its records: its event is another than the others'."""
    sizes = (4, 40, 40)
    rows = np.zeros((sum(sizes), 3), np.float32)
    data = fdp.FederatedData(
        {"x": rows, "y": np.zeros(len(rows), np.int32)}, np.concatenate([[0], np.cumsum(sizes)])
    )
    config = fdp.LocalConfig(batch_size=8, clip_norm=1.0, noise_multiplier=1.0)
    algorithm = fdp.dp_sgd(_model(), fdp.dp_sgd_trainer(_model(), config))
    run = fdp.simulation(algorithm, data, fdp.participation(fdp.full_participation(), 3))
    with pytest.raises(ValueError, match="replace"):
        fdp.PrivacyAccounting(run, "replace_one", "rdp")


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optax.adam},
        {"optimizer": optax.sgd(0.01)},
        {"update_transforms": [lambda delta, context: delta]},
    ],
)
def test_scaffold_refuses_steps_that_its_control_variates_do_not_describe(options):
    with pytest.raises(ValueError, match=r"plain steps of `optax\.sgd`"):
        fdp.scaffold(_model(), _trainer(**options), num_clients=NUM_CLIENTS)


def test_a_batch_larger_than_the_program_was_built_for_is_refused():
    all_clients = fdp.participation(fdp.full_participation(), NUM_CLIENTS)
    run = fdp.simulation(fdp.fedavg(_model(), _trainer()), _data(), all_clients)
    state = run.init(KEY)
    larger = run.hyper._replace(local=run.hyper.local._replace(batch_size=jnp.int32(3)))
    with pytest.raises(ValueError, match="batch_size must be at most 2"):
        run.run(state, KEY, 1, larger)


def test_the_chunk_follows_the_expected_cohort_and_not_the_slots():
    cohorts = fdp.participation(fdp.poisson(), NUM_CLIENTS, 2)
    run = fdp.simulation(fdp.fedavg(_model(), _trainer()), _data(), cohorts)
    assert run.layout.chunk == 2
