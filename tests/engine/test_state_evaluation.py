"""What is evaluated of a state: the server's model, or the one that each client would use."""

import functools

import jax
import numpy as np
import pytest
from cases import CASES
from marks import later
from oracles import local
from oracles.replay import Replay
from references import PLAIN
from small_problem import (
    NUM_CLIENTS,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
    snapshot,
    theta_of,
)

from fedjax_dp import algorithms
from fedjax_dp.core import masks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import evaluation, evaluator, simulation
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.engine.evaluation import Evaluator
from fedjax_dp.engine.facts import examples_of

KEY = jax.random.key(5)
# Held-out clients of other sizes than the training ones, one of them without any example.
HELD_OUT = make_data(sizes=(4, 3, 0, 6, 1, 9), seed=3)
WHOLE = make_data(sizes=(29,), seed=4)


def by_hand(theta, data):
    """Loss and accuracy of a logistic model on some examples, in float64."""
    x, y = (np.asarray(data[name], np.float64) for name in ("x", "y"))
    if not len(y):
        return np.nan, np.nan
    logits = theta[0] + x @ theta[1:]
    return np.mean(np.logaddexp(0, logits) - y * logits), np.mean((logits > 0) == (y > 0.5))


def moved(tree, rng):
    """Moves every number of a tree by chance, so that no two parameters are alike."""
    return jax.tree.map(
        lambda x: (
            x + rng.normal(size=x.shape).astype(x.dtype)
            if np.issubdtype(x.dtype, np.floating)
            else x
        ),
        snapshot(tree),
    )


@functools.cache
def trained(name):
    """A state as training might leave it, with what evaluates it."""
    case, rng = CASES[name], np.random.default_rng(2)
    sim = case.simulation(PLAIN)
    state = sim.init(KEY)
    state = state._replace(server=moved(state.server, rng), clients=moved(state.clients, rng))
    clients = algorithms.pool(HELD_OUT) if case.is_pooled else HELD_OUT
    trainer = (private_trainer if case.is_private else plain_trainer)(make_model(), case.settings())
    found = evaluator(
        sim,
        make_model(),
        case.data(),
        whole=WHOLE,
        clients=clients,
        trainer=trainer,
        on_training=True,
    )
    return found, state, case


SHARED = ("fedavg", "scaffold", "fedadam", "dp_sgd", "dp_fedavg")


@pytest.mark.parametrize("name", later(SHARED, but=["fedavg"], soon=["scaffold"]))
def test_the_servers_model_is_evaluated_on_the_whole_and_on_every_client(name):
    found, state, _ = trained(name)
    theta = theta_of(state.server.params)
    whole = found.whole(state)
    np.testing.assert_allclose((whole.loss, whole.accuracy), by_hand(theta, WHOLE.client(0)), 1e-5)
    by_client = found.clients(state)
    expected = [by_hand(theta, HELD_OUT.client(i)) for i in range(NUM_CLIENTS)]
    losses, accuracies = np.transpose(expected)
    np.testing.assert_allclose(by_client.client_loss, losses, rtol=1e-5)
    np.testing.assert_allclose(by_client.client_accuracy, accuracies, rtol=1e-6)
    np.testing.assert_array_equal(by_client.client_sizes, HELD_OUT.sizes)
    pooled = by_hand(theta, HELD_OUT.examples)
    np.testing.assert_allclose((by_client.loss, by_client.accuracy), pooled, rtol=1e-5)


def test_the_pool_is_one_client():
    found, state, _ = trained("centralized")
    theta = theta_of(state.server.params)
    by_client = found.clients(state)
    assert by_client.client_loss.shape == (1,)
    assert by_client.client_loss[0] == pytest.approx(by_hand(theta, HELD_OUT.examples)[0], rel=1e-5)


def test_local_models_are_evaluated_each_on_its_own_client():
    found, state, _ = trained("local_only")
    assert found.whole is None, "no model stands for the whole population"
    thetas = theta_of(state.clients)
    assert len(np.unique(thetas, axis=0)) > 2
    expected = [by_hand(thetas[i], HELD_OUT.client(i)) for i in range(NUM_CLIENTS)]
    by_client = found.clients(state)
    np.testing.assert_allclose(by_client.client_loss, np.transpose(expected)[0], rtol=1e-5)
    np.testing.assert_allclose(by_client.client_accuracy, np.transpose(expected)[1], rtol=1e-6)


@pytest.mark.parametrize("name", later(["fedavg", "local_only"], but=["local_only"]))
def test_models_in_use_are_evaluated_on_what_they_are_trained_on(name):
    found, state, case = trained(name)
    shared, train = name == "fedavg", case.data()
    thetas = theta_of(state.server.params if shared else state.clients)
    each = [thetas if shared else thetas[i] for i in range(NUM_CLIENTS)]
    expected = [by_hand(theta, train.client(i)) for i, theta in enumerate(each)]
    seen = found.training(state)
    np.testing.assert_allclose(seen.client_loss, np.transpose(expected)[0], rtol=1e-5)
    np.testing.assert_allclose(seen.client_accuracy, np.transpose(expected)[1], rtol=1e-6)
    np.testing.assert_array_equal(seen.client_sizes, train.sizes)


def test_a_client_of_a_cluster_uses_the_model_that_fits_its_training_data():
    """The choice reads training examples; the figures are of held-out ones."""
    found, state, case = trained("ifca")
    assert found.whole is None
    train, thetas = case.data(), theta_of(state.server.models)
    by_client = found.clients(state)
    chosen = []
    for i in range(NUM_CLIENTS):
        losses = [by_hand(theta, train.client(i))[0] for theta in thetas]
        chosen.append(0 if np.isnan(losses).all() else int(np.argmin(losses)))
        expected = by_hand(thetas[chosen[-1]], HELD_OUT.client(i))
        measured = by_client.client_loss[i], by_client.client_accuracy[i]
        np.testing.assert_allclose(measured, expected, rtol=1e-5)
    assert len(set(chosen)) > 1, "or the test sees no choice"


def test_training_data_that_are_read_come_to_the_device_a_few_clients_at_a_time(monkeypatch):
    found, state, case = trained("ifca")
    at_once, largest = found.clients(state), []
    part, train = evaluation._part, case.data()

    def watched(*arguments):
        few = part(*arguments)
        largest.append(max(len(array) for array in few.arrays.values()))
        return few

    monkeypatch.setattr(evaluation, "_part", watched)
    monkeypatch.setattr(evaluation, "_PART_BYTES", train.num_bytes // 3)
    sim = case.simulation(PLAIN)
    streamed = evaluation._of_personal(sim.federation.personal, make_model(), train, HELD_OUT, {})
    placed, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *where: placed.append(x) or put(x, *where))
    again = streamed(state)
    assert not any(isinstance(x, Examples) for x in placed)
    assert len(largest) > 2 and max(largest) < train.num_examples
    np.testing.assert_allclose(again.client_loss, at_once.client_loss, rtol=1e-6)
    np.testing.assert_array_equal(again.client_accuracy, at_once.client_accuracy)


class _Draws(Replay):
    """The draws of local training for an evaluation."""

    def _client_key(self, round_index, client):
        return fold(self.key, Purpose.EVALUATION, round_index, client)


def trained_by_hand(case, start, mask, i, draws):
    """One round of plain or private local training from a client's model; masked entries stay."""
    x, y = (np.asarray(case.data().client(i)[name], np.float64) for name in ("x", "y"))
    rate, batch, epochs, bound, noise = (column[i] for column in case.settings())
    steps = local.num_steps(len(y), batch, epochs)
    if case.is_private:
        rows, drawn = draws.batches(0, i, steps), draws.record_noise(0, i, steps)
        return local.dp_sgd(start, x, y, rows, drawn, rate, batch, bound, noise)
    theta = start
    for one in draws.batches(0, i, steps):
        theta = np.where(mask, local.sgd(theta, x, y, [one], rate), theta)
    return theta


@pytest.mark.parametrize("name", later(CASES, but=["lottery_fl"]))
def test_the_model_of_a_client_after_local_training_is_that_of_training_by_hand(name):
    found, state, case = trained(name)
    sim = case.simulation(PLAIN)
    held_out = algorithms.pool(HELD_OUT) if case.is_pooled else HELD_OUT
    train, key = case.data(), jax.random.key(8)
    # One weight of every client is pruned, where clients keep masks.
    state = state._replace(
        clients=jax.tree.map(lambda x: x & 127 if x.dtype == np.uint8 else x, state.clients)
    )
    before = snapshot(state)
    settings, sampler = case.settings(), case.record_sampler()
    draws = _Draws(key, None, sampler, train.sizes, settings.batch_size, [(), (3,)])
    federation, examples = sim.federation, jax.device_put(examples_of(train))

    @jax.jit
    def model_of(state, examples, i):
        if federation.personal is None:
            return masks.parted(federation.shared(state))
        return masks.parted(federation.personal(state, examples.client(i)))

    losses, accuracies, moved_by = [], [], []
    for i in range(train.num_clients):
        params, mask = jax.device_get(model_of(state, examples, i))
        # The bias is never pruned.
        kept = np.array([True, *(np.ones(3, bool) if mask is None else np.asarray(mask["w"]))])
        start = theta_of(params)
        assert np.all(start[~kept] == 0) and (mask is None) == np.all(kept)
        end = trained_by_hand(case, start, kept, i, draws)
        moved_by.append(np.max(np.abs(end - start)))
        loss, accuracy = by_hand(end, held_out.client(i))
        losses.append(loss), accuracies.append(accuracy)
    evaluation = found.after_local(state, sim.hyper, key)
    np.testing.assert_allclose(evaluation.client_loss, losses, rtol=2e-5)
    np.testing.assert_allclose(evaluation.client_accuracy, accuracies, rtol=1e-6)
    assert np.sum(np.array(moved_by) > 1e-3) == np.sum(train.sizes > 0)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_may_be_evaluated_again_and_again():
    found, state, _ = trained("fedavg")
    before = snapshot(state)
    first, second = found.clients(state), found.clients(state)
    np.testing.assert_array_equal(first.client_loss, second.client_loss)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def build(**held_out):
    model = make_model()
    joined = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    algorithm = algorithms.fedavg(model, plain_trainer(model))
    sim = simulation(algorithm, make_data(), joined, PLAIN)
    return evaluator(sim, model, make_data(), **held_out)


def test_there_is_nothing_to_evaluate_without_held_out_data():
    assert build() == Evaluator(None, None)
    assert build(whole=WHOLE).clients is None
    assert build(clients=HELD_OUT).whole is None


def test_held_out_clients_must_be_the_ones_that_train():
    wrong = FederatedData(HELD_OUT.examples, HELD_OUT.offsets[[0, 2, 3, 4, 5, 6]])
    with pytest.raises(ValueError, match="clients must hold data of the 6 clients that train"):
        build(clients=wrong)
