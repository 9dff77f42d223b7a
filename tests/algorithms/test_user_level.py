"""Privacy of whole clients: oracles that need whole rounds."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import later, telling
from references import PLAIN
from rounds import flat
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer, snapshot

from fedjax_dp.algorithms import ae_dpfl, dp_fedavg, fedadam, fedavg, fedavgm
from fedjax_dp.clients import (
    ClientData,
    LocalConfig,
    PublicClient,
    UpdateContext,
    add_client_noise,
    local_trainer,
)
from fedjax_dp.core import trees
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import PrivacyAccounting, as_metrics, simulation
from fedjax_dp.models import poisson_regression, weighted
from fedjax_dp.models.base import Model
from fedjax_dp.models.weights import of_classes_alone
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.claims import UnclaimedNoise
from fedjax_dp.server import by_realised_count, gaussian_mean, laplace_mean, uniform_mean

KEY = jax.random.key(5)


def run(algorithm, rounds=2, data=None, sampler=None, cohort=None):
    data = make_data() if data is None else data
    chosen = participants.participation(
        sampler or sampling.full_participation(), data.num_clients, cohort
    )
    sim = simulation(algorithm, data, chosen, PLAIN)
    state, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return snapshot(state), record, as_metrics(record, info), sim


def released(aggregator, total, key, numbers=None):
    """What a round releases of a total, and its info."""
    numbers = aggregator.numbers if numbers is None else numbers
    _, aggregate, info = aggregator.combine(
        aggregator.init(None), numbers, total, closed(keys=(KEY, key))
    )
    return aggregate, info


def contributed(aggregator, update):
    return aggregator.contribute(aggregator.init(None), aggregator.numbers, update, sent_by())


@telling
def test_noise_of_the_clients_is_noise_of_the_server():
    """N clients with S²σ²/N each: their mean has a deviation of Sσ/N by coordinate, as printed."""
    clip_norm, multiplier, clients, size = 0.3, 1.4, 40, 500
    deltas = np.random.default_rng(0).normal(size=(clients, size)).astype(np.float32)
    mean = gaussian_mean(clip_norm, 0.0, clients)
    share = add_client_noise(clip_norm * multiplier / math.sqrt(clients))
    central = gaussian_mean(clip_norm, multiplier, clients)

    clipped = jax.vmap(lambda d: contributed(mean, d)[0])(deltas)
    exact = jnp.sum(clipped, axis=0) / clients

    client = PublicClient(jnp.int32(1), jnp.int32(0), limit=1)

    def one(delta, key):
        return share(delta, UpdateContext(None, None, client, None, key))

    @jax.jit
    @jax.vmap
    def both(key):
        noised = jnp.sum(jax.vmap(one)(clipped, jax.random.split(key, clients)), axis=0)
        mean_of_server, _ = released(central, (clients * exact, 0.0), key)
        return noised / clients - exact, mean_of_server - exact

    for error in both(jax.random.split(KEY, 400)):
        # 200,000 draws know a deviation to 0.16 %.
        assert np.std(error) == pytest.approx(clip_norm * multiplier / clients, rel=0.01)


@telling
def test_without_clipping_and_noise_it_is_fedavg_with_equal_weights():
    model = make_model()
    private = dp_fedavg(
        model,
        plain_trainer(model),
        aggregator=gaussian_mean(
            clip_norm=1e9, noise_multiplier=0.0, expected_cohort_size=NUM_CLIENTS
        ),
    )
    plain = fedavg(model, plain_trainer(model), aggregator=uniform_mean())
    ours, _, info, _ = run(private)
    np.testing.assert_allclose(
        flat(ours.server.params), flat(run(plain)[0].server.params), atol=1e-6
    )
    assert np.all(info["num_clipped"] == 0)


# Denominators.


@telling
def test_the_realised_denominator_divides_by_who_came_and_claims_nothing():
    model = make_model()
    mean = gaussian_mean(0.2, 0.0, 3.0)
    realised = by_realised_count(mean)
    assert isinstance(realised.claim, UnclaimedNoise)
    sampler = sampling.poisson()
    by = {}
    for name, aggregator in (("expected", mean), ("realised", realised)):
        algorithm = fedavg(model, plain_trainer(model), aggregator=aggregator)
        state, _, info, sim = run(algorithm, 1, sampler=sampler, cohort=3)
        by[name] = flat(state.server.params) - flat(sim.init(KEY).server.params)
        accounting = PrivacyAccounting(sim)
        assert list(accounting.ledgers) == (["client"] if name == "expected" else [])
    count = info["num_participants"][0]
    assert count != 3
    np.testing.assert_allclose(by["realised"], by["expected"] * 3 / count, atol=1e-6)


@telling
def test_a_round_without_clients_is_skipped_by_the_realised_denominator():
    aggregator = by_realised_count(gaussian_mean(0.2, 5.0, 3.0))
    zeros = (({"w": jnp.zeros(4)}, jnp.float32(0)), jnp.float32(0))
    aggregate, info = released(aggregator, zeros, KEY)
    np.testing.assert_array_equal(aggregate["w"], 0)
    assert info["noise_stddev"] == 0
    ones = (({"w": jnp.zeros(4)}, jnp.float32(0)), jnp.float32(6))
    aggregate, info = released(aggregator, ones, KEY)
    assert np.all(aggregate["w"] != 0)
    assert info["noise_stddev"] == pytest.approx(0.2 * 5.0 / 6)


@pytest.mark.parametrize("make", later([fedavgm, fedadam], mark=telling))
def test_server_optimisers_are_post_processing_of_the_same_private_mean(make):
    """DP-FedAvgM and DP-FedAdam: same aggregate, same account, another step."""
    model = make_model()
    aggregator = gaussian_mean(0.2, 0.8, NUM_CLIENTS)
    state, record, _, sim = run(make(model, plain_trainer(model), aggregator=aggregator))
    plain, plain_record, _, plain_sim = run(
        fedavg(model, plain_trainer(model), aggregator=aggregator)
    )
    assert np.abs(flat(state.server.params) - flat(plain.server.params)).max() > 1e-3
    spent = []
    for each, its_record in ((sim, record), (plain_sim, plain_record)):
        accounting = PrivacyAccounting(each)
        accounting.charge(its_record)
        spent.append(accounting.epsilon({"client": 1e-5})["client"][0])
    assert spent[0] == spent[1]


# AE-DPFL.


def three_class_model():
    """Its logits are parameters and nothing else: a client's vote is what it learnt last."""
    return Model.from_functions(
        lambda key: {"w": jnp.zeros(3)},
        lambda params, x: jnp.broadcast_to(params["w"], (x.shape[0], 3)) + x[:, :3],
        loss="softmax_cross_entropy",
    )


VOTES = (2, 0, 2, 1, 2, 0)
# The second query favours class 1 by so much that no client is in doubt.
QUERIES = np.array([[0.0, 0, 0], [0, 99.0, 0], [0, 0, 0]], np.float32)


def voters():
    """One example a client, whose label is the class that it will vote for."""
    x = np.zeros((len(VOTES), 3), np.float32)
    return FederatedData({"x": x, "y": np.array(VOTES, np.int32)}, np.arange(len(VOTES) + 1))


def poll(noise_multiplier=None, *, clip_norm=1.0, num_rounds=1, **options):
    model = three_class_model()
    trainer = local_trainer(model, LocalConfig(1.0, 1, 3))
    aggregator = None
    if noise_multiplier is not None:
        aggregator = gaussian_mean(clip_norm, noise_multiplier, len(VOTES))
    return ae_dpfl(
        model, trainer, public_x=QUERIES, num_rounds=num_rounds, aggregator=aggregator, **options
    )


@telling
@pytest.mark.parametrize("multiplier", later([None, 0.0, 1e-3], but=[1e-3], mark=telling))
def test_votes_without_noise_name_the_plurality(multiplier):
    state, _, info, _ = run(poll(multiplier), 1, voters())
    np.testing.assert_array_equal(state.server.labels, [2, 1, 2])
    assert info["num_participants"][0] == len(VOTES)
    # The server learnt what was answered: class 2 twice, class 1 where the input says so.
    assert np.argmax(state.server.params["w"]) == 2


@telling
def test_blocks_of_queries_are_answered_round_by_round():
    state, _, _, sim = run(poll(0.0, num_rounds=3), 1, voters())
    np.testing.assert_array_equal(state.server.labels, [2, -1, -1])
    state, *_ = sim.run(state, KEY, 2)
    np.testing.assert_array_equal(state.server.labels, [2, 1, 2])


@telling
def test_nothing_is_answered_where_no_client_votes():
    state, *_ = run(poll(), 1, voters(), sampler=sampling.poisson(), cohort=1e-6)
    np.testing.assert_array_equal(state.server.labels, -1)
    np.testing.assert_array_equal(state.server.params["w"], 0)


@telling
@pytest.mark.parametrize("clip_norm", later([0.01, 1.0, 50.0], but=[50.0]))
def test_noise_on_counts_of_votes_is_the_multiplier_times_the_root_of_the_queries(clip_norm):
    multiplier = 0.7
    algorithm = poll(multiplier, clip_norm=clip_norm)
    aggregator = algorithm.aggregator

    @jax.jit
    @jax.vmap
    def zeros(key):
        return released(aggregator, (jnp.zeros((3, 3)), 0.0), key)[0]

    noise = np.asarray(zeros(jax.random.split(KEY, 4000)))
    # One vote, as it is sent, in the units of the release.
    server = algorithm.init(KEY)
    data = voters()
    client = ClientData(
        {k: jnp.asarray(v) for k, v in data.examples.items()},
        jnp.int32(0), jnp.int32(1), jnp.int32(0), limit=1,
    )  # fmt: skip
    vote = algorithm.client(server.start, None, client, algorithm.hyper, KEY).update
    sent, _ = contributed(aggregator, vote)
    assert float(trees.l2_norm(sent)) == pytest.approx(clip_norm, rel=1e-5)
    one = float(jnp.max(sent)) / len(VOTES)
    assert noise.std() / one == pytest.approx(multiplier * math.sqrt(3), rel=0.02)


@telling
def test_laplace_noise_on_counts_of_votes_is_the_multiplier_times_the_queries():
    """Votes of three queries are clipped to an L1 norm of the bound: a third of it for each."""
    model, multiplier = three_class_model(), 0.7
    trainer = local_trainer(model, LocalConfig(1.0, 1, 3))
    aggregator = laplace_mean(2.0, multiplier, len(VOTES))
    algorithm = ae_dpfl(model, trainer, public_x=QUERIES, aggregator=aggregator)

    @jax.jit
    @jax.vmap
    def zeros(key):
        return released(aggregator, (jnp.zeros((3, 3)), 0.0), key)[0]

    noise = np.asarray(zeros(jax.random.split(KEY, 4000)))
    _, _, info, _ = run(algorithm, 1, voters())
    votes = jnp.zeros((3, 3)).at[:, 0].set(2.0 / math.sqrt(3))
    sent, was_clipped = contributed(aggregator, votes)
    assert was_clipped == 1 and info["num_clipped"][0] == len(VOTES)
    one = float(jnp.max(sent)) / len(VOTES)
    # A Laplace variable of scale b has a mean absolute value of b.
    assert np.abs(noise).mean() / one == pytest.approx(multiplier * 3, rel=0.02)


@pytest.mark.parametrize("clip_norm", later([0.5, 2.0], mark=telling))
def test_the_norms_that_are_logged_are_those_of_the_votes(clip_norm):
    """Votes have the norm of the bound; the clients' models have moved by something else."""
    _, _, info, _ = run(poll(0.0, clip_norm=clip_norm), 1, voters())
    np.testing.assert_allclose(info["update_norm_quantiles"][0], clip_norm, rtol=1e-5)
    assert info["num_clipped"][0] == 0


@pytest.mark.parametrize("num_queries, sigma", [(1, 2.0), (100, 30.0), (5000, 90.0)])
def test_many_queries_cost_one_gaussian_with_less_noise(num_queries, sigma):
    """ε of Q queries with noise σ on counts: RDP is αQ/(2σ²), that of one release with σ/√Q."""
    multiplier = sigma / math.sqrt(num_queries)
    ledger = Ledger("client", "add_remove")
    mean = gaussian_mean(1.0, multiplier, 1.0)
    ledger.charge(mean.claim.event(mean.numbers))
    each = dp_accounting.rdp.RdpAccountant()
    each.compose(dp_accounting.GaussianDpEvent(sigma), num_queries)
    spent = float(ledger.epsilon(1e-5, "rdp")[0])
    assert spent == pytest.approx(each.get_epsilon(1e-5), rel=1e-6)
    # Any order of the closed form bounds it from above.
    alpha = np.linspace(1.01, 200, 20_000)
    curve = alpha * num_queries / (2 * sigma**2)
    classic = np.min(curve + math.log(1e5) / (alpha - 1))
    assert spent <= classic * (1 + 1e-9)


@telling
def test_votes_of_sampled_clients_are_charged_as_sampled():
    algorithm = poll(0.9)
    _, record, _, sim = run(algorithm, 1, voters(), sampler=sampling.poisson(), cohort=3)
    accounting = PrivacyAccounting(sim)
    accounting.charge(record)
    reference = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(0.9))
    reference.compose(event)
    spent = accounting.epsilon({"client": 1e-5})["client"][0]
    assert spent == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_outputs_without_classes_are_refused():
    model = Model.from_functions(
        lambda key: jnp.zeros(2), lambda p, x: jnp.zeros((x.shape[0], 4, 5)), loss="squared_error"
    )
    trainer = local_trainer(model, LocalConfig())
    with pytest.raises(ValueError, match="model must have logits"):
        ae_dpfl(model, trainer, public_x=QUERIES)
    counts = poisson_regression(jax.ShapeDtypeStruct(QUERIES.shape[1:], jnp.float32))
    with pytest.raises(ValueError, match=r"must have a loss of classes, .* got 'poisson_nll'"):
        ae_dpfl(counts, trainer, public_x=QUERIES)


def test_public_examples_have_no_weights_of_their_own():
    model = three_class_model()
    assert of_classes_alone(model) is model
    assert of_classes_alone(weighted(model, example_weights="w")).loss_fn is model.loss_fn
    both = weighted(model, class_weights=(1, 2, 3), example_weights="w")
    kept = of_classes_alone(both).loss_fn
    assert (kept.class_weights, kept.example_weights) == ((1, 2, 3), None)
