"""Grey-box checks: quiet on every private step, loud on each that was broken on purpose."""

import functools

import audit_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling

from fedjax_dp.algorithms import fedavg
from fedjax_dp.audit.canaries import plant_clients
from fedjax_dp.audit.noise import measure_noise
from fedjax_dp.audit.steps import check_client, check_cohort, check_gradient_rule
from fedjax_dp.clients import gradients
from fedjax_dp.clients.base import LocalConfig, TrainingMetrics
from fedjax_dp.core import trees
from fedjax_dp.engine import federation
from fedjax_dp.models import registry
from fedjax_dp.models.base import Model
from fedjax_dp.privacy import mechanisms
from fedjax_dp.server import by_parts, private

pytestmark = [pytest.mark.xdist_group("audited steps"), floats]

KEY = jax.random.key(5)
ROW = LocalConfig(batch_size=3.0, clip_norm=0.7, noise_multiplier=1.3)


def broken_names(results):
    return {check.name for check in results if check.is_violated}


def shares(results):
    """How much of what is allowed was seen, where anything is allowed."""
    return {c.name: c.measured / c.allowed for c in results if c.allowed > 0}


def check_rule(rule, model=None, batch=None, **options):
    model = model or cases.model()
    if batch is None:
        batch = {name: array[:4] for name, array in cases.data().examples.items()}
    return check_gradient_rule(rule, model.init(KEY), batch, ROW, KEY, **options)


RULES = {
    "gaussian": gradients.clipped,
    "per_layer": functools.partial(gradients.clipped, per_layer=True),
    "laplace": functools.partial(gradients.clipped, make_mechanism=mechanisms.laplace),
}


@telling
@pytest.mark.parametrize("name", later(RULES, but=["gaussian"], mark=telling))
def test_gradient_rules_hold_what_they_state(name):
    results = check_rule(RULES[name](cases.model()))
    assert not broken_names(results)
    # The checks are close to what they allow: they would see a little more.
    compared = shares(results)
    assert compared["step with and without a record"] > 0.5
    if name == "gaussian":
        assert compared["gradient of a record alone"] > 0.999
        assert compared["sum with a record exchanged"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (12,)), ("thesis_cnn", (28, 28, 1)), ("char_transformer", (9,))]
)
def test_gradient_rules_hold_what_they_state_on_networks(name, shape):
    is_text = name == "char_transformer"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape)).astype(np.float32)
    y = np.arange(3, dtype=np.int32)
    if is_text:
        x, y = (rng.integers(0, 20, (3, *shape)).astype(np.int32) for _ in range(2))
    structure = {"x": jax.ShapeDtypeStruct(shape, x.dtype)}
    model = registry.build(name, structure, 20 if is_text else 10)
    results = check_rule(gradients.clipped(model), model, {"x": x, "y": y}, num_draws=16)
    assert not broken_names(results)


def unclipped(rule, model):
    """Sums gradients as they are."""
    plain = gradients.plain(model)
    return rule._replace(micro_batch=plain.micro_batch)


def counted(rule, model):
    """Divides by the realised number of records."""
    del model

    def release(summed, count, config, key):
        return rule.release(summed, count, config._replace(batch_size=count), key)

    return rule._replace(release=release)


def padded(rule, model):
    """Counts padding as records."""
    del model

    def micro_batch(params, batch, is_real, key, config):
        return rule.micro_batch(params, batch, jnp.ones_like(is_real), key, config)

    return rule._replace(micro_batch=micro_batch)


def averaged(rule, model):
    """Adds noise that was made for the sum to the mean, so that it is divided once too often."""
    del model

    def release(summed, count, config, key):
        noise = trees.subtract(rule.release(summed, count, config, key), summed)
        return trees.add(trees.scale(summed, 1 / 9), trees.scale(noise, 1 / 81))

    return rule._replace(release=release)


def careless(rule, model):
    """Clips by a factor that is not a number where the norm is not."""

    def micro_batch(params, batch, is_real, key, config):
        def one(example, real):
            single = jax.tree.map(lambda a: a[None], example)
            gradient = jax.grad(lambda p: model.losses(p, single)[0][0])(params)
            norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient)))
            factor = jnp.where(norm > config.clip_norm, config.clip_norm / norm, 1.0)
            return jax.tree.map(lambda x: jnp.where(real, x * factor, 0), gradient)

        each = jax.vmap(one)(batch, is_real)
        summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
        return gradients.GradientSum(summed, jnp.float32(0), jnp.float32(0), params)

    return rule._replace(micro_batch=micro_batch)


@telling
@pytest.mark.parametrize(
    ("breakage", "found"),
    [
        (unclipped, {"gradient of a record alone", "sum with and without a record"}),
        (counted, {"step with and without a record"}),
        (padded, {"sum with a record in the padding"}),
        (averaged, {"step with and without a record"}),
        (careless, {"gradient of a record alone", "sum with and without a record"}),
    ],
)
def test_each_broken_gradient_rule_is_found(breakage, found):
    model = cases.model()
    rule = breakage(gradients.clipped(model), model)
    assert broken_names(check_rule(rule)) >= found


@telling
def test_half_the_noise_of_a_step_is_found():
    rule = gradients.clipped(cases.model(), make_mechanism=cases.half_the_noise)
    assert broken_names(check_rule(rule)) == {"step with and without a record", "noise of a step"}


@telling
def test_noise_that_is_five_percent_off_is_found():
    def low(clip_norm, noise_multiplier):
        quiet = mechanisms.gaussian(clip_norm, 0.95 * noise_multiplier)
        return mechanisms.gaussian(clip_norm, noise_multiplier)._replace(add_noise=quiet.add_noise)

    rule = gradients.clipped(cases.model(), make_mechanism=low)
    assert "noise of a step" in broken_names(check_rule(rule, num_draws=1000))


def rows_model(inputs, outputs):
    """Adds up the outputs of a dense layer over the rows of an example."""
    return Model.from_functions(
        lambda key: jnp.zeros((inputs, outputs)),
        lambda weights, x: jnp.sum(x @ weights, axis=1),
        loss=lambda outputs, batch: jnp.sum(outputs, axis=-1),
        name="rows",
    )


@pytest.mark.parametrize(("inputs", "outputs"), later([(16, 16), (2048, 64)], mark=telling))
def test_a_record_whose_rows_cancel_is_clipped(inputs, outputs):
    # Its gradient is what is left of two large rows; a norm computed from the rows is mostly
    # rounding, and one that comes out too small lets the gradient through unclipped.
    model = rows_model(inputs, outputs)
    x = np.random.default_rng(0).normal(size=(3, 2, inputs)).astype(np.float32)
    results = check_rule(gradients.clipped(model), model, {"x": x}, num_draws=8)
    assert not broken_names(results)


def test_models_that_mix_records_are_refused():
    structure = {"x": jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)}
    model = registry.build("resnet18", structure, 10, norm="batch")
    with pytest.raises(ValueError, match="replace batch norm by group norm"):
        gradients.clipped(model)


def test_rules_that_claim_nothing_are_refused():
    with pytest.raises(ValueError, match="rule must state a bound and an event"):
        check_rule(gradients.plain(cases.model()))


def check_mean(aggregator, participation, num_draws=128):
    model = cases.model()
    algorithm = fedavg(model, cases.plain_trainer(model), aggregator=aggregator)
    state = cases.state_of(algorithm, cases.data(), participation)
    return check_cohort(algorithm, cases.data(), state, KEY, num_draws=num_draws)


SLOWEST = ("skellam", "staircase")


@pytest.mark.parametrize(
    "name", later(cases.MEANS, soon=[name for name in cases.MEANS if name not in SLOWEST])
)
def test_rounds_hold_what_their_aggregators_state(name):
    results = check_mean(*cases.aggregators()[name])
    assert not broken_names(results)
    compared = shares(results)
    assert compared["round with and without a client"] > 0.7
    if name in ("gaussian", "adaptive"):
        assert compared["contribution of a client"] > 0.999


CLIENT_ALGORITHMS = [name for name, unit in cases.private_pairs() if unit == "client"]
# Their clients train and send as those of another algorithm do.
ALIKE = [
    *("fedavgm", "fedyogi", "fedadagrad", "reflected_fedprox", "fedsplit", "fedrep", "rc_dpfl"),
    *("f_cdpfl", "km_cdpfl", "o_dpcfl", "robust_hdp", "noise_oracle", "local_only", "centralized"),
]


def soon_but_alike(names):
    return later(names, soon=[name for name in names if name not in ALIKE])


def assert_rounds_hold(algorithm):
    """Neither more than the bounds of a cohort nor so little that nothing was tried."""
    state = cases.state_of(algorithm, cases.data(), cases.full_participation())
    results = check_cohort(algorithm, cases.data(), state, KEY, num_draws=128)
    assert not broken_names(results)
    compared = shares(results)
    assert compared["round with and without a client"] > 0.7
    assert compared["contribution of a client"] > 0.999


@pytest.mark.parametrize("name", soon_but_alike(CLIENT_ALGORITHMS))
def test_rounds_of_every_algorithm_hold_what_they_state(name):
    algorithm = cases.build(name, cases.model(), "client")
    assert_rounds_hold(algorithm)


@telling
@pytest.mark.parametrize(
    "how",
    [
        {"scales": {"control": 0.2, "params": 3.0}},
        {"shares": {"control": 0.6, "params": 0.8}},
    ],
)
def test_rounds_of_updates_in_parts_hold_what_they_state(how):
    mean = by_parts(cases.mean(), **how)
    algorithm = cases.build("scaffold", cases.model(), "client", aggregator=mean)
    assert_rounds_hold(algorithm)


def by_count(mean):
    """Divides by the number of clients that contributed."""

    def combine(state, numbers, total, close):
        summed, count = total
        state, aggregate, info = mean.combine(state, numbers, summed, close)
        share = 2.0 / jnp.maximum(count, 1.0)
        return state, trees.scale(aggregate, share), info

    def contribute(state, numbers, update, sender):
        return mean.contribute(state, numbers, update, sender), jnp.float32(1)

    return mean._replace(contribute=contribute, combine=combine)


def by_weight(mean):
    """Weighs clipped updates, with noise for a weight of 1."""

    def contribute(state, numbers, update, sender):
        bounded, flag = mean.contribute(state, numbers, update, sender)
        return trees.scale(bounded, sender.weight), flag

    return mean._replace(contribute=contribute)


def weighted_noise(mean):
    """Adds less noise the more is there to hide."""

    def combine(state, numbers, total, close):
        state, noised, info = mean.combine(state, numbers, total, close)
        bare = trees.scale(total[0], 0.5)
        size = 1 + trees.l2_norm(bare)
        noise = jax.tree.map(lambda n, b: (n - b) / size, noised, bare)
        return state, trees.add(bare, noise), info

    return mean._replace(combine=combine)


def half_noise(mean):
    del mean
    return private.private_mean(cases.half_the_noise, 0.5, 1.2, 2.0)


@telling
@pytest.mark.parametrize(
    ("breakage", "found"),
    [
        (by_count, {"round with and without a client", "noise with and without a client"}),
        (by_weight, {"contribution of a client", "round with and without a client"}),
        (weighted_noise, {"noise of a round", "noise with and without a client"}),
        (half_noise, {"round with and without a client", "noise of a round"}),
    ],
)
def test_each_broken_mean_is_found(breakage, found):
    mean, participation = cases.aggregators()["gaussian"]
    assert broken_names(check_mean(breakage(mean), participation)) >= found


@telling
def test_a_count_that_adapts_the_clip_norm_without_noise_is_found():
    mean, participation = cases.aggregators()["adaptive"]

    def combine(state, numbers, total, close):
        _, aggregate, info = mean.combine(state, numbers, total, close)
        return state * (1 + 0.01 * total[2]), aggregate, info

    found = broken_names(check_mean(mean._replace(combine=combine), participation))
    assert found == {"round with and without a client"}


def test_an_algorithm_for_one_population_is_audited_with_canaries():
    algorithm = cases.build("dp_fedavg", cases.model(), "client")
    sized = algorithm._replace(numbers=algorithm.numbers._replace(num_clients=cases.NUM_CLIENTS))
    planted = cases.plant_in(plant_clients, sized, num_canaries=3)
    federation(planted.algorithm, planted.data, planted.participation)


def test_means_that_claim_nothing_are_refused():
    algorithm = fedavg(cases.model(), cases.plain_trainer(cases.model()))
    state = cases.state_of(algorithm, cases.data(), cases.full_participation())
    with pytest.raises(ValueError, match="algorithm must claim privacy for clients"):
        check_cohort(algorithm, cases.data(), state, KEY)


RECORD_ALGORITHMS = [name for name, unit in cases.private_pairs() if unit == "record"]


def check_one_client(name, **parts):
    planted = cases.plant(name, "record", 3, **parts)
    state = cases.state_of(planted.algorithm, planted.data, planted.participation)
    return planted, state, check_client(planted, state, KEY, num_draws=128)


@pytest.mark.parametrize("name", soon_but_alike(RECORD_ALGORITHMS))
def test_what_a_client_sends_hides_its_records(name):
    planted, _, results = check_one_client(name)
    assert results and not broken_names(results)
    # Votes are left to the canaries: a weight that depends on no record is all there is.
    assert planted.sends_votes or max(check.measured / check.allowed for check in results) > 0.9


@pytest.mark.parametrize("name", later(["dp_sgd", "ae_dpfl"], mark=telling))
def test_a_weight_that_depends_on_the_records_is_found(name, monkeypatch):
    planted, state, _ = check_one_client(name)
    inner = planted.algorithm.client
    # Training that marks none of its metrics as exact, of which the engine cannot know.
    monkeypatch.setattr(TrainingMetrics, "reported_by", lambda self, client: self)

    def client(message, own, client, hyper, key):
        output = inner(message, own, client, hyper, key)
        return output._replace(weight=output.weight + output.training.loss_sum)

    # At zero parameters every loss is the same, and so is a canary's.
    start = "start" if name == "ae_dpfl" else "params"
    params = jax.tree.map(lambda x: x + 0.1, getattr(state.server, start))
    state = state._replace(server=state.server._replace(**{start: params}))
    leaky = planted._replace(algorithm=planted.algorithm._replace(client=client))
    assert broken_names(check_client(leaky, state, KEY, num_draws=16))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_noise_is_measured_beside_values_of_any_size(scale):
    def release(value, key):
        return {"a": value + scale * jax.random.normal(key, (200,)), "b": value}

    noise = measure_noise(release, (jnp.float32(1e4 * scale),), KEY, num_draws=500)
    assert noise.stddevs[0] == pytest.approx(scale, rel=5 / np.sqrt(2 * 200 * 499))
    assert noise.stddevs[1] == 0
    assert noise.counts == (200 * 499, 499)
