"""What is not deployed is refused when the deployment is built; masks of simulated keys are."""

from functools import partial

import jax
import numpy as np
import pytest
from cases import CASES
from federations import deploy, key
from flwr.app import Message
from marks import slow, telling
from small_problem import NUM_CLIENTS, NUM_FEATURES, ROUNDS, make_data, make_model, plain_trainer

from fedjax_dp import algorithms
from fedjax_dp.algorithms.base import FinishForAll
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine import (
    anderson,
    examples_of,
    federation,
    population_of,
    scheduled,
    serverless,
)
from fedjax_dp.flower import Node, client_app, deployed
from fedjax_dp.flower.node import CLIENTS
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.plan import Plan, require_same
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.models import logistic_regression
from fedjax_dp.server import secure
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.private import gaussian_mean, laplace_mean


class NoNodes:
    """Nodes that are never asked."""


def everyone():
    return participants.participation(sampling.full_participation(), NUM_CLIENTS)


def bound(algorithm):
    return federation(algorithm, population_of(make_data()), everyone())


def masked_fedavg(keys=None, graph=secure.all_pairs(NUM_CLIENTS)):
    encoding = fixed_point(NUM_CLIENTS, integer_bits=6)
    mean = secure.masked(weighted_mean(), encoding, graph, keys=keys)
    return algorithms.fedavg(make_model(), plain_trainer(make_model()), aggregator=mean)


def test_numbers_that_change_over_rounds_are_refused():
    algorithm = algorithms.fedavg(make_model(), plain_trainer(make_model()))
    changing = scheduled(bound(algorithm), {"local.learning_rate": [1.0, 0.5]}, 2)
    with pytest.raises(ValueError, match="federation must have no schedules to be deployed"):
        deployed(changing, NoNodes())


def test_rounds_with_other_numbers_than_those_of_the_plan_are_refused():
    simulated = deployed(
        bound(algorithms.fedavg(make_model(), plain_trainer(make_model()))), NoNodes()
    )
    hyper = simulated.federation.hyper
    # No price depends on it, and nodes would train with their own.
    faster = hyper._replace(local=hyper.local._replace(learning_rate=7.0))
    state = simulated.init(jax.random.key(0))
    with pytest.raises(ValueError, match="hyper must be the numbers of the plan"):
        simulated.run(state, jax.random.key(0), 1, faster)


def test_what_nodes_cannot_do_is_refused():
    stateful = CASES["scaffold"].make(make_model())
    finish = FinishForAll(lambda server, aggregate: aggregate, lambda message, own, hyper: own)
    finishing = stateful._replace(client_state=stateful.client_state._replace(finish=finish))
    with pytest.raises(ValueError, match="algorithm must have no second message"):
        deployed(bound(finishing), NoNodes())
    plain = bound(algorithms.fedavg(make_model(), plain_trainer(make_model())))
    wrappers = (partial(anderson, memory=2), serverless)
    for wrapped in (wrapper(plain) for wrapper in wrappers):
        with pytest.raises(
            ValueError,
            match="federation must have no wrapper to be deployed: no acceleration, clock",
        ):
            deployed(wrapped, NoNodes())
    with pytest.raises(ValueError, match="keys must be one of"):
        deployed(plain, NoNodes(), keys="mine")


@pytest.mark.parametrize("options", [{"calibration": "paper"}, {"mechanism": "gamma_shares"}])
def test_noise_whose_scale_the_server_sends_is_refused_on_both_sides(options):
    # Numbers of other clients, of which the server could say anything.
    shape = jax.ShapeDtypeStruct((NUM_FEATURES,), np.float32)
    model = logistic_regression(shape, 2, gradient_bound=1.0)
    config = LocalConfig(
        learning_rate=1.0, batch_size=1, num_steps=2, clip_norm=1.0, noise_multiplier=1.0
    )
    whole = sampling.full_participation()._replace(name="full_batch")
    trainer = dp_sgd_trainer(model, config, sampler=whole)
    noise = algorithms.OutputPerturbation(regularizer=0.3, **options)
    algorithm = algorithms.warm_start_averaging(
        model, trainer, num_clients=NUM_CLIENTS, rows_per_round=2, perturbation=noise
    )
    data = make_data()
    labels = np.asarray(data.examples["y"], np.int32)
    data = FederatedData({"x": data.examples["x"], "y": labels}, data.offsets)
    message = "keys must be parity, which trusts the server: it sends the scale of the noise"
    with pytest.raises(ValueError, match=message):
        deployed(federation(algorithm, population_of(data), everyone()), NoNodes())
    node = Node([0], data.select([0]))
    app = client_app(lambda node, population: algorithm, lambda context: node)
    facts = {"sizes": data.sizes.tolist(), "validation sizes": [], "plan names": []}
    asked = Packet(facts | {"plan texts": []}).record()
    (reply,) = InProcess(app, {11: {}}).send_and_receive([Message(asked, 11, CLIENTS)])
    assert message in reply.error.reason


def test_masks_of_keys_that_one_process_agreed_are_refused():
    agreed = secure.agreed_keys(NUM_CLIENTS)
    with pytest.raises(ValueError, match="the keys of masks must be simulated for parity keys"):
        deployed(bound(masked_fedavg(agreed)), NoNodes(), keys="parity")


def test_masks_that_would_show_more_than_sums_are_refused():
    graph, words = secure.all_pairs(4), fixed_point(NUM_CLIENTS)
    few = participants.participation(sampling.fixed_size(), NUM_CLIENTS, 4)
    known = participants.participation(
        sampling.without_amplification(sampling.fixed_size()), NUM_CLIENTS, 4
    )
    mean = secure.masked(gaussian_mean(0.2, 0.8, 4), words, graph)
    private = algorithms.dp_fedavg(make_model(), plain_trainer(make_model()), aggregator=mean)
    population = population_of(make_data())
    for keys in ("device", "parity"):
        with pytest.raises(ValueError, match="no masks in a federation where secret cohorts"):
            deployed(federation(private, population, few), NoNodes(), keys=keys)
    deployed(federation(private, population, known), NoNodes())
    stateful = CASES["scaffold"].make(make_model())
    seen = stateful.client_state._replace(known=lambda own: own)
    masked = secure.masked(stateful.aggregator, words, graph)
    with pytest.raises(ValueError, match="of whose client states the server has a part"):
        deployed(bound(stateful._replace(aggregator=masked, client_state=seen)), NoNodes())


def test_masks_of_another_graph_are_another_plan():
    population = population_of(make_data())
    one = Plan(masked_fedavg(), population)
    other = Plan(masked_fedavg(graph=secure.all_pairs(NUM_CLIENTS, dropouts=1)), population)
    assert one.digest != other.digest
    with pytest.raises(ValueError, match="masks of the server must be"):
        require_same(one.described, other.described)


@telling
def test_plans_whose_rounds_cost_otherwise_differ():
    model, population = make_model(), population_of(make_data())
    settings = LocalConfig(
        learning_rate=0.3, batch_size=4, num_steps=2, clip_norm=1.0, noise_multiplier=1.0
    )

    def described(mean=None, sampler=sampling.poisson):
        if mean is not None:
            algorithm = algorithms.dp_fedavg(model, plain_trainer(model), aggregator=mean)
        else:
            trainer = dp_sgd_trainer(model, settings, sampler=sampler())
            algorithm = algorithms.fedavg(model, trainer)
        return Plan(algorithm, population).described

    with pytest.raises(ValueError, match=r"privacy of a round of the server must be .*Gaussian"):
        require_same(described(gaussian_mean(0.5, 2.0, 6.0)), described(laplace_mean(0.5, 2.0, 6)))
    with pytest.raises(ValueError, match=r"privacy of a round of the server must be .*Sampled"):
        require_same(described(), described(sampler=sampling.full_participation))
    # Of one event, bound, and shape.
    own, others = (described(gaussian_mean(0.5, 2.0, 6, per_layer=x)) for x in (False, True))
    with pytest.raises(ValueError, match="traced contribution of the server must be"):
        require_same(own, others)
    require_same(own, described(gaussian_mean(0.5, 2.0, 6)))


class Masked:
    """A case of masked sums."""

    def __init__(self):
        self.data, self.validation = make_data, lambda: None
        self.make, self.participation = lambda model: masked_fedavg(), everyone


@slow
def test_masked_sums_of_nodes_are_those_of_a_simulation():
    there = deploy("fedavg", case=Masked()).simulation
    state, _, info = there.run(there.init(key()), key(), ROUNDS)
    assert np.all(info.aggregator["num_lost"] == 0)
    simulated = bound(masked_fedavg())
    expected = simulated.init(key())
    examples = jax.device_put(examples_of(make_data()))
    for _ in range(ROUNDS):
        expected, _, _ = simulated.run_round(expected, simulated.hyper, examples, key())
    pairs = (jax.tree.leaves(each.server) for each in (state, expected))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
