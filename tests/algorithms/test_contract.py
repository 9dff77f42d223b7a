"""The privacy contract, clause by clause, as far as a round can keep or break it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from cases import CASES, PRIVATE, kinds_first, quick_first
from marks import telling
from oracles.generalization import noised_gma
from rounds import after_one_round, flat, hand_round
from small_problem import COHORT, SIZES, assert_same_state, make_data, make_model, snapshot

from fedjax_dp.algorithms import dp_fedavg, dp_sgd, fedavg
from fedjax_dp.algorithms.base import ClientOutput
from fedjax_dp.clients import LocalConfig, clipped, dp_sgd_trainer, local_trainer
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine import Cohort, Fate, Federation, federation, simulation
from fedjax_dp.engine import examples_of as all_examples
from fedjax_dp.engine.facts import population_of
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.server import gaussian_mean, uniform_mean, weighted_mean

FEDERATED = [name for name in CASES if not CASES[name].is_pooled]
CLIENT_LEVEL = ["dp_fedavg", "dp_both", "blur_lus"]
# What a trainer clips by example never sends an update that is not finite.
UNCLIPPED = [name for name in FEDERATED if not CASES[name].is_private]
CLIP_NORM, MULTIPLIER = 0.2, 0.8


def params_of(state):
    return flat(state.server.params)


def full_participation(num_clients):
    """A cohort of all clients, in order."""
    fate = np.full(num_clients, Fate.CONTRIBUTED, np.int8)
    return Cohort(np.arange(num_clients, dtype=np.int32), fate, np.int32(0))


def bound_to(algorithm, data, validation=None) -> Federation:
    joins = participants.participation(sampling.full_participation(), data.num_clients)
    return federation(algorithm, population_of(data, validation), joins)


def central_noise(hand):
    """The standard normal draws of the first round's central noise."""
    ref = hand.ref
    return ref.case.run_of(ref.initial, ref.key).replay.central_noise(0)


# 1. A public divisor.


def test_sum_over_records_is_divided_by_a_public_number():
    rule = clipped(make_model())
    config = LocalConfig(batch_size=4.0, clip_norm=1.0, noise_multiplier=0.0)
    total = {"b": jnp.float32(2.0), "w": jnp.arange(3.0)}
    release = jax.jit(rule.release)
    for count in (0, 1, 9):
        gradient = release(total, count, config, jax.random.key(0))
        np.testing.assert_allclose(flat(gradient), flat(total) / 4)


# 2. Noise from the mechanism's own sensitivity.


@pytest.mark.parametrize("clip_norm, multiplier, expected", [(0.5, 2.0, 10.0), (4.0, 0.3, 2.5)])
def test_noise_has_the_scale_that_sensitivity_and_multiplier_say(clip_norm, multiplier, expected):
    aggregator = gaussian_mean(clip_norm, multiplier, expected)
    zeros = {"a": jnp.zeros((100, 200)), "b": jnp.zeros(5000)}
    state = aggregator.init(zeros)
    combine = jax.jit(aggregator.combine)
    _, aggregate, info = combine(state, aggregator.numbers, (zeros, 0.0), closed())
    stddev = multiplier * clip_norm / expected
    noise = flat(aggregate) / stddev
    # Four standard errors of a standard deviation and of a mean: a scale off by 3 % fails.
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    np.testing.assert_allclose(info["noise_stddev"], stddev, rtol=1e-6)
    np.testing.assert_allclose(
        aggregator.claim.sensitivity(state, aggregator.numbers).l2, clip_norm
    )
    assert aggregator.claim.event(aggregator.numbers).noise_multiplier == pytest.approx(multiplier)


@pytest.mark.parametrize("clip_norm, multiplier, batch", [(0.5, 2.0, 10.0), (4.0, 0.3, 2.5)])
def test_record_noise_has_the_scale_that_sensitivity_and_multiplier_say(
    clip_norm, multiplier, batch
):
    rule = clipped(make_model())
    config = LocalConfig(batch_size=batch, clip_norm=clip_norm, noise_multiplier=multiplier)
    zeros = {"a": jnp.zeros((100, 200)), "b": jnp.zeros(5000)}
    noise = flat(jax.jit(rule.release)(zeros, 3, config, jax.random.key(2)))
    noise /= multiplier * clip_norm / batch
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert rule.event(config).noise_multiplier == pytest.approx(multiplier)


@pytest.mark.parametrize("per_layer", [False, True])
def test_one_client_moves_the_sum_by_at_most_the_sensitivity(per_layer):
    aggregator = gaussian_mean(0.7, 1.0, 3.0, per_layer=per_layer)
    state = aggregator.init(None)
    rng = np.random.default_rng(0)
    norms = []
    for scale in (1e-3, 0.1, 1.0, 1e4, 1e30):
        update = {"a": scale * rng.normal(size=(5, 4)), "b": scale * rng.normal(size=3)}
        update = jax.tree.map(jnp.float32, update)
        contribution, _ = aggregator.contribute(
            state, aggregator.numbers, update, sent_by(weight=50)
        )
        norms.append(np.linalg.norm(flat(contribution)))
    assert max(norms) <= 0.7 * (1 + 1e-6)
    assert max(norms) > 0.6


def test_weights_do_not_enter_the_private_mean():
    aggregator = gaussian_mean(0.7, 1.0, 3.0)
    state = aggregator.init(None)
    for update in ({"w": jnp.array([0.3, 0.4])}, {"w": jnp.array([30.0, 40.0])}):
        light, heavy = (
            aggregator.contribute(state, aggregator.numbers, update, sent_by(weight=w))
            for w in (0.1, 1000.0)
        )
        np.testing.assert_array_equal(flat(light), flat(heavy))


# 3. Sampler and accountant are one value.


def test_shuffled_epochs_are_refused_behind_a_private_gradient():
    config = LocalConfig(batch_size=4, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"shuffled epochs have no privacy amplification.*poisson"):
        dp_sgd_trainer(make_model(), config, sampler=sampling.shuffled())


def test_truncated_cohorts_are_refused_behind_noise_without_an_analysis():
    from fedjax_dp.server import laplace_mean

    model = make_model()
    trainer = local_trainer(model, LocalConfig(batch_size=2))
    algorithm = fedavg(model, trainer, aggregator=laplace_mean(1.0, 1.0, 3.0))
    participation = participants.participation(sampling.poisson(capacity=4), len(SIZES), 3)
    with pytest.raises(ValueError, match="known analysis for Gaussian noise only"):
        simulation(algorithm, make_data(), participation)


def test_private_training_without_its_numbers_is_refused():
    for missing in ("clip_norm", "noise_multiplier"):
        numbers = {"clip_norm": 1.0, "noise_multiplier": 1.0} | {missing: None}
        with pytest.raises(ValueError, match=f"{missing} must be given for private training"):
            dp_sgd_trainer(make_model(), LocalConfig(batch_size=4, **numbers))


def test_dp_sgd_refuses_a_trainer_that_is_not_private():
    model = make_model()
    with pytest.raises(ValueError, match="trainer must clip and noise every record's gradient"):
        dp_sgd(model, local_trainer(model, LocalConfig()))


# 4. Empty cohorts, empty clients; padding is in the laws.


@pytest.mark.parametrize("name", kinds_first(FEDERATED))
def test_empty_cohort_takes_its_step(name):
    hand = hand_round(name)
    state, info = hand([])
    assert state.round == 1 and info["num_participants"] == 0
    chex.assert_tree_all_finite(info)
    if name in CLIENT_LEVEL:
        noise = MULTIPLIER * CLIP_NORM * central_noise(hand) / COHORT
        moved = params_of(state) - params_of(hand.ref.initial)
        np.testing.assert_allclose(moved, noise, atol=1e-6)
    elif name in PRIVATE:
        case = hand.ref.case
        run = case.run_of(hand.ref.initial, hand.ref.key)._replace(num_rounds=1)
        run.replay.cohort = lambda r: []
        for part, by_hand in case.expect(run).items():
            np.testing.assert_allclose(case.observe(state)[part], by_hand, atol=1e-5)
    elif name == "gma_private":
        np.testing.assert_allclose(params_of(state), _noise_that_is_masked(hand), atol=1e-6)
    else:
        expected = hand.ref.initial._replace(round=np.int32(1))
        assert_same_state(state, snapshot(_decayed(name, expected)), atol=1e-7)


def _noise_that_is_masked(hand):
    """What a round without clients leaves of the model: noise, masked by noised votes."""
    run = hand.ref.case.run_of(hand.ref.initial, hand.ref.key)
    run.replay.theta_shapes, run.replay.cohort = 2 * run.replay.theta_shapes, lambda r: []
    start = params_of(hand.ref.initial)
    return noised_gma(start, [], run.replay, 1, None, CLIP_NORM, MULTIPLIER, COHORT, 0.6, 0.5)


def _decayed(name, state):
    """FedAdam's second moment decays in a round without news; nothing else moves from rest."""
    if name not in ("fedadam", "gma_fedadam"):
        return state
    opt_state = state.server.opt_state
    second = jax.tree.map(lambda v: 0.9 * v, opt_state.second)
    return state._replace(server=state.server._replace(opt_state=opt_state._replace(second=second)))


@telling
def test_server_momentum_carries_on_through_an_empty_cohort():
    hand = hand_round("fedavgm")
    first, _ = after_one_round("fedavgm")
    second, _ = hand([], state=first)
    moved = params_of(first) - params_of(hand.ref.initial)
    np.testing.assert_allclose(params_of(second) - params_of(first), 0.7 * moved, atol=1e-6)


@pytest.mark.parametrize("name", kinds_first(FEDERATED))
def test_client_without_examples_equals_no_client(name):
    hand = hand_round(name)
    assert SIZES[1] == 0
    with_it, info = hand([1])
    without, _ = hand([])
    assert_same_state(with_it, without, atol=0)
    assert info["num_participants"] == 1 and info["num_non_finite"] == 0


# 5. A client whose update is not finite contributes zero and is counted.


def with_bad_client(hand, bad, value, rows=slice(None)):
    examples = hand.examples()
    start = hand.starts[bad]
    examples["x"][start : start + hand.sizes[bad]][rows] = value
    return examples


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", kinds_first(UNCLIPPED))
def test_client_with_bad_data_contributes_zero_and_is_counted(name, value):
    hand = hand_round(name)
    state, info = hand([0, 2, 3], examples=with_bad_client(hand, 2, value))
    expected, _ = hand([0, 3])
    assert_same_state(state, expected, atol=1e-6)
    assert info["num_non_finite"] == 1 and info["num_participants"] == 3
    chex.assert_tree_all_finite((state.server, state.aggregator, state.clients, info))


@pytest.mark.parametrize("name", kinds_first(FEDERATED))
def test_client_with_an_infinite_update_contributes_zero_and_is_counted(name):
    hand = hand_round(name)
    hyper = hand.ref.sim.hyper
    rates = np.array(hyper.local.learning_rate)
    rates[2] = np.inf
    broken = hyper._replace(local=hyper.local._replace(learning_rate=rates))
    state, info = hand([0, 2, 3], hyper=broken)
    expected, _ = hand([0, 3])
    assert_same_state(state, expected, atol=1e-6)
    assert info["num_non_finite"] == 1
    chex.assert_tree_all_finite((state.server, state.aggregator, state.clients, info))


@pytest.mark.parametrize("name", quick_first(["dp_sgd", "dp_both"]))
def test_bad_examples_behind_clipping_leave_everything_finite(name):
    """Each bad example contributes zero; its client still takes part with the others."""
    hand = hand_round(name)
    for rows in (slice(1), slice(None)):
        state, info = hand([0, 2, 3], examples=with_bad_client(hand, 2, np.nan, rows))
        assert info["num_non_finite"] == 0
        # The exact loss is shown as it is.
        assert np.isnan(info.pop("train_loss")).any()
        chex.assert_tree_all_finite((state.server, state.aggregator, state.clients, info))


@functools.cache
def sending(aggregator_name):
    """A round in which every client sends the number in its first row, with weight 2."""
    model = make_model()
    aggregator = {"mean": weighted_mean, "sum": uniform_mean}[aggregator_name]()
    algorithm = fedavg(model, local_trainer(model, LocalConfig()), aggregator=aggregator)

    def client(message, own, client, hyper, key):
        sent = client.gather(jnp.zeros((), jnp.int32))["x"][0]
        update = jax.tree.map(lambda p: jnp.full_like(p, sent), message)
        return ClientOutput(update, jnp.float32(2), own)

    algorithm = algorithm._replace(client=client)

    def send(values):
        data = FederatedData.from_clients([{"x": np.float32([[v]])} for v in values])
        return moved_from_zeros(algorithm, data)

    return send


def moved_from_zeros(algorithm, data):
    """The parameters after one round that begins at zeros, and how many were not finite."""
    bound = bound_to(algorithm, data)
    state = bound.init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, state.server.params)
    state = state._replace(server=state.server._replace(params=zeros))
    examples = jax.device_put(all_examples(data))
    after, record, _ = jax.jit(bound.run_round)(state, bound.hyper, examples, jax.random.key(0))
    return flat(after.server.params), record.count(Fate.NOT_FINITE)


@pytest.mark.parametrize(
    ("aggregator", "values", "expected", "num_lost"),
    [
        # 2 · 2e38 is beyond float32.
        pytest.param("mean", [1.0, 2e38, 3.0], 2.0, 1, id="beyond floats by its weight"),
        # Alone each is finite; together they are not, and take the third with them.
        pytest.param("sum", [1.0, 2e38, 2e38], 1.0, 2, id="beyond floats in any sum"),
    ],
)
def test_finite_update_that_no_sum_would_hold_contributes_zero(
    aggregator, values, expected, num_lost
):
    moved, num_non_finite = sending(aggregator)(values)
    np.testing.assert_allclose(moved, expected)
    assert num_non_finite == num_lost


# 7. Sums, norms and noise in float32, whatever the model computes in.


@pytest.mark.parametrize("name", kinds_first(CASES))
def test_state_types_are_preserved_under_a_model_in_bfloat16(name):
    case = CASES[name]
    algorithm = case.make(make_model(jnp.bfloat16))
    data = case.data()
    second = case.validation()
    bound = bound_to(algorithm, data, second)

    def one_round(key):
        state = bound.init(key)
        hyper = jax.tree.map(jnp.asarray, bound.hyper)
        return state, bound.run_round(state, hyper, all_examples(data, second), key)[0]

    before, after = jax.eval_shape(one_round, jax.random.key(0))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (before, after)]
    assert kinds[0] == kinds[1]
    # Else a loop outside, as over a sweep, would trace the step twice.
    assert not any(x.weak_type for x in jax.tree.leaves((before, after)))
    assert jnp.dtype(jnp.bfloat16) in {dtype for _, dtype in kinds[0]}


@telling
@pytest.mark.parametrize(
    "make", [weighted_mean, uniform_mean, lambda: gaussian_mean(9.0, 0.0, 1.0)]
)
def test_contributions_and_aggregates_are_float32(make):
    aggregator = make()
    update = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
    state = aggregator.init(update)
    contribution = aggregator.contribute(state, aggregator.numbers, update, sent_by(weight=3))
    _, aggregate, _ = aggregator.combine(state, aggregator.numbers, contribution, closed())
    assert contribution[0]["w"].dtype == aggregate["w"].dtype == jnp.float32


@telling
def test_sum_over_many_clients_does_not_stall_in_bfloat16():
    """In bfloat16, 256 + 1 is 256; a mean of 600 ones would be 0.43."""
    base = gaussian_mean(1e3, 0.0, 600.0)
    # An aggregator that leaves the type to the engine.
    careless = base._replace(
        contribute=lambda state, numbers, update, sender: (update, jnp.float32(0))
    )
    model = make_model(jnp.bfloat16)
    algorithm = fedavg(model, local_trainer(model, LocalConfig()), aggregator=careless)

    def client(message, own, client, hyper, key):
        update = jax.tree.map(jnp.ones_like, message)
        return ClientOutput(update, jnp.float32(1), own)

    data = FederatedData.from_clients([{"x": np.zeros((1, 3), np.float32)}] * 600)
    moved, _ = moved_from_zeros(algorithm._replace(client=client), data)
    np.testing.assert_allclose(moved, 1.0, rtol=1e-2)


@telling
def test_gradient_sums_are_float32_under_a_model_in_bfloat16():
    """512 examples with equal gradients: their sum stalls in bfloat16."""
    model = make_model(jnp.bfloat16)
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    batch = {"x": jnp.ones((600, 3), jnp.bfloat16), "y": jnp.zeros(600)}
    config = LocalConfig(clip_norm=10.0, noise_multiplier=1.0, batch_size=600.0)
    real = jnp.ones(600, bool)
    micro_batch = jax.jit(clipped(model).micro_batch)
    summed = micro_batch(params, batch, real, jax.random.key(0), config).gradient
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(summed))
    np.testing.assert_allclose(flat(summed), 300.0)
    released = jax.jit(clipped(model).release)(summed, 600, config, jax.random.key(0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(released))


# 10 and 11. Keys.


@telling
@pytest.mark.xdist_group("algorithm scaffold")
def test_draws_of_a_client_do_not_depend_on_its_cohort():
    hand = hand_round("scaffold")
    alone, _ = hand([4])
    for cohort in ([0, 4, 5], [5, 4, 3, 2, 1, 0]):
        among, _ = hand(cohort)
        np.testing.assert_array_equal(flat(among.clients["w"][4]), flat(alone.clients["w"][4]))


@telling
def test_no_key_feeds_two_draws(monkeypatch):
    """Every key of two rounds of both noises over three clients, recorded and compared."""
    model = make_model()
    trainer = dp_sgd_trainer(model, LocalConfig(0.1, 2.0, 1, clip_norm=1.0, noise_multiplier=1.0))
    algorithm = dp_fedavg(
        model,
        trainer,
        aggregator=gaussian_mean(clip_norm=1.0, noise_multiplier=1.0, expected_cohort_size=3.0),
    )
    data = make_data((2, 0, 3))
    bound = bound_to(algorithm, data)
    state, cohort = bound.init(jax.random.key(0)), full_participation(3)
    examples = jax.device_put(all_examples(data))
    used = {"normal": [], "bits": []}
    for kind, module in (("normal", random_bits), ("bits", jax.random)):
        original = getattr(module, kind)

        def recorded(key, *arguments, kind=kind, original=original, **options):
            if not isinstance(key, jax.core.Tracer):
                used[kind].append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
            return original(key, *arguments, **options)

        monkeypatch.setattr(module, kind, recorded)
    with jax.disable_jit():
        for _ in range(2):
            key = jax.random.key(5)
            state, *_ = bound.step(state, bound.hyper, examples, cohort, key)
    # Steps: ceil(2 / 2) + 0 + ceil(3 / 2), a draw for both leaves each; one central noise a round.
    assert len(used["normal"]) == 2 * (3 + 1)
    assert len(used["bits"]) == 2 * 3
    keys = used["normal"] + used["bits"]
    assert len(set(keys)) == len(keys)


@telling
def test_two_noises_of_one_client_differ():
    """Two transforms that add noise draw from two keys."""
    from fedjax_dp.clients import add_client_noise
    from fedjax_dp.clients.client_data import ClientData

    model = make_model()
    noise = add_client_noise(1.0)
    params = model.init(jax.random.key(0))
    client = ClientData(
        {"x": jnp.zeros((1, 3)), "y": jnp.zeros(1)}, jnp.int32(0), jnp.int32(0), jnp.int32(0), 1
    )

    def delta(*transforms):
        config = LocalConfig(batch_size=1, num_epochs=0)
        trainer = local_trainer(model, config, update_transforms=transforms)
        return flat(trainer.train(params, client, config, jax.random.key(1)).delta)

    once, twice = delta(noise), delta(noise, noise)
    assert np.abs(twice - 2 * once).max() > 1e-3
