"""The privacy contract: every clause holds for a program, and fails with its bug put in."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, telling

from fedjax_dp.algorithms import dp_fedavg, dp_sgd, fedavg, local_only
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, gradients, local_trainer
from fedjax_dp.core import keys, trees
from fedjax_dp.core.made import made
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine import ExecutionConfig, Fate, simulation
from fedjax_dp.engine import round as engine_round
from fedjax_dp.io.checkpoint import Checkpoints
from fedjax_dp.models import Model
from fedjax_dp.privacy import (
    AdaptiveClipping,
    Ledger,
    make_adaptive_clipping,
    mechanisms,
    sensitivities,
)
from fedjax_dp.privacy.mechanisms import clipping
from fedjax_dp.privacy.reports import statement as statements
from fedjax_dp.server import adaptive_gaussian_mean, gaussian_mean, private, weighted_mean

pytestmark = floats

NUM_PARAMETERS = 4000
KEY = 3


class Clause(NamedTuple):
    """A check and a bug that it has to find; `put_in` takes the monkeypatch."""

    name: str
    check: Callable[[], None]
    put_in: Callable[[pytest.MonkeyPatch], None]
    is_long: bool
    is_quick_with_bug: bool


CLAUSES: list[Clause] = []


def clause(put_in, *, is_long=False, is_quick_with_bug=False):
    """Registers a check; a long one compiles several rounds, or tests of the parts stand for it.

    A check is quick with its bug where it needs no other round than its own, or none at all. The
    other bugs change the program of a round, and compiling it is all that they cost.
    """

    def register(check):
        CLAUSES.append(Clause(check.__name__, check, put_in, is_long, is_quick_with_bug))
        return check

    return register


def linear_model(num_parameters=NUM_PARAMETERS):
    """The gradient of a record is the record itself, whatever the parameters."""
    return Model.from_functions(
        lambda key: jnp.zeros(num_parameters),
        lambda params, x: x @ params,
        loss=lambda outputs, batch: outputs,
        name="linear",
    )


def clients_of(*records):
    """One client an argument, each with its records `[records, parameters]`."""
    return FederatedData.from_clients([{"x": np.asarray(r, np.float32)} for r in records])


def constant_clients(*values, size=1):
    """Clients whose update has every entry at minus a value."""
    return clients_of(*[np.full((size, NUM_PARAMETERS), v) for v in values])


ONE_STEP = LocalConfig(learning_rate=1.0, batch_size=64, num_steps=1)


def client_level(clip_norm=1.0, noise_multiplier=0.0, expected=4.0, aggregator=None):
    model = linear_model()
    trainer = local_trainer(model, ONE_STEP)
    if aggregator is not None:
        return fedavg(model, trainer, aggregator=aggregator)
    return dp_fedavg(
        model,
        trainer,
        aggregator=gaussian_mean(
            clip_norm=clip_norm, noise_multiplier=noise_multiplier, expected_cohort_size=expected
        ),
    )


def record_level(algorithm=dp_sgd, **numbers):
    """DP-SGD at the clients; a batch that is expected to be larger than a client is all of it."""
    model = linear_model()
    numbers = {"clip_norm": 1.0, "noise_multiplier": 0.0, "batch_size": 8.0} | numbers
    config = LocalConfig(learning_rate=1.0, num_steps=1, **numbers)
    return algorithm(model, dp_sgd_trainer(model, config, sampler=sampling.poisson()))


def run(algorithm, data, *, seed=KEY, num_rounds=1, participation=None, chunk=1):
    drawn = participation or participants.participation(
        sampling.full_participation(), data.num_clients
    )
    execution = ExecutionConfig(clients_per_chunk=chunk, rounds_per_call=num_rounds)
    sim = simulation(algorithm, data, drawn, execution)
    key = jax.random.key(seed)
    return sim.run(sim.init(key), key, num_rounds)


def released(algorithm, data, **options):
    return np.asarray(run(algorithm, data, **options)[0].server.params, np.float64)


def assert_stddev(values, expected):
    """Five standard errors of a deviation that was measured on normal draws."""
    values = np.asarray(values, np.float64).ravel()
    assert np.std(values) == pytest.approx(expected, rel=5 / np.sqrt(2 * values.size))


def in_place_of(owner, name):
    """A bug: a function that is called in place of another, which it gets before its arguments."""

    def bug(function):
        def put_in(monkeypatch):
            kept = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, **named: function(kept, *args, **named))

        return put_in

    return bug


def of_numbers(make_mechanism, numbers):
    return make_mechanism(numbers["clip_norm"], numbers["noise_multiplier"])


def changed_mean(change):
    """A bug in every private mean."""

    @in_place_of(private, "private_mean")
    def put_in(build, make_mechanism, clip_norm, noise_multiplier, expected):
        mean = build(make_mechanism, clip_norm, noise_multiplier, expected)
        return change(mean, make_mechanism, expected)

    return put_in


# 1. The sum is divided by a public constant.


def _divides_by_the_realised_count(mean, make_mechanism, expected):
    def combine(state, numbers, total, close):
        (summed, num_clipped), count = total
        state, aggregate, info = mean.combine(state, numbers, (summed, num_clipped), close)
        return state, trees.scale(aggregate, expected / jnp.maximum(count, 1)), info

    return mean._replace(
        contribute=lambda *args: (mean.contribute(*args), jnp.float32(1)), combine=combine
    )


@clause(changed_mean(_divides_by_the_realised_count), is_long=True)
def divided_by_the_expected_and_not_by_the_realised_count():
    three, eight = constant_clients(*[-1.0] * 3), constant_clients(*[-1.0] * 8)
    for data in (three, eight):
        after = released(client_level(expected=4.0), data)
        clipped = 1 / np.sqrt(NUM_PARAMETERS)
        np.testing.assert_allclose(after, clipped * data.num_clients / 4, rtol=1e-5)


@in_place_of(gradients, "clipped")
def _normalises_records(build, *args, **options):
    rule = build(*args, **options)

    def release(total, count, config, key):
        return rule.release(total, count, config._replace(batch_size=count), key)

    return rule._replace(release=release)


@clause(_normalises_records, is_long=True)
def record_sums_are_divided_by_the_nominal_batch_size():
    data = constant_clients(-1.0, size=5)
    after = released(record_level(batch_size=8.0), data)
    np.testing.assert_allclose(after, 5 / 8 / np.sqrt(NUM_PARAMETERS), rtol=1e-5)


# 2. Noise comes from the sensitivity of what is noised.


def _adds_noise_of_the_sum_to_the_mean(mean, make_mechanism, expected):
    def combine(state, numbers, total, close):
        averaged = trees.scale(total[0], 1.0 / expected)
        return state, of_numbers(make_mechanism, numbers).add_noise(close.private_key, averaged), {}

    return mean._replace(combine=combine)


@clause(changed_mean(_adds_noise_of_the_sum_to_the_mean), is_long=True)
def noise_calibrated_to_the_sum_is_added_to_the_sum():
    after = released(client_level(0.5, 3.0, expected=8.0), constant_clients(0.0, 0.0))
    assert_stddev(after, 0.5 * 3.0 / 8.0)


def _weights_by_size(mean, make_mechanism, expected):
    def contribute(state, numbers, update, sender):
        bounded, clipped = mean.contribute(state, numbers, update, sender)
        return trees.scale(bounded, sender.weight), clipped

    return mean._replace(contribute=contribute)


@clause(changed_mean(_weights_by_size), is_long=True)
def noise_for_uniform_weights_hides_clients_of_any_size():
    without = released(client_level(), constant_clients(-1.0, 0.0, 0.0))
    large = clients_of(
        np.full((1, NUM_PARAMETERS), -1.0),
        np.zeros((1, NUM_PARAMETERS)),
        np.full((50, NUM_PARAMETERS), -1.0),
    )
    moved = 4.0 * np.linalg.norm(released(client_level(), large) - without)
    assert moved <= 1.0 + 1e-5


@in_place_of(sensitivities, "sensitivity_of_sum")
def _forgets_the_weight(build, *args, max_weight=1.0, **options):
    return build(*args, **options)


@clause(_forgets_the_weight, is_quick_with_bug=True)
def weights_enter_the_sensitivity_and_the_noise():
    mechanism = mechanisms.gaussian(0.5, 2.0, max_weight=3.0)
    noised = jax.jit(mechanism.add_noise)(jax.random.key(0), jnp.zeros(NUM_PARAMETERS))
    assert_stddev(noised, 0.5 * 2.0 * 3.0)


@in_place_of(sensitivities, "noise_stddev")
def _takes_any_number(kept, sensitivity, multiplier):
    return multiplier


@clause(_takes_any_number, is_quick_with_bug=True)
def noise_without_a_sensitivity_is_refused():
    with pytest.raises(ValueError, match="needs a stated Sensitivity"):
        sensitivities.noise_stddev(1.0, 1.0)


@in_place_of(mechanisms, "laplace")
def _laplace_upside_down(build, clip_norm, multiplier):
    upside_down = dpa.LaplaceDpEvent(1 / multiplier)
    return build(clip_norm, multiplier)._replace(event=lambda: upside_down)


@clause(_laplace_upside_down)
def the_laplace_scale_is_not_inverted_in_the_accountant():
    mechanism = mechanisms.laplace(2.0, 0.25)
    draws = jax.jit(mechanism.add_noise)(jax.random.key(0), jnp.zeros(200_000))
    # The mean absolute value of Laplace noise is its scale, with standard error scale/√n.
    scale = float(jnp.mean(jnp.abs(draws)))
    ledger = Ledger(unit="client", num_units=1)
    ledger.charge(mechanism.event())
    assert ledger.epsilon(1e-9, "pld") == pytest.approx(2.0 / scale, rel=0.02)


# 3. Sampler and accountant are one value.


@in_place_of(sampling, "poisson")
def _draws_a_fixed_number(build, *args):
    return made(build(*args)._replace(draw=sampling.fixed_size().draw))


@clause(_draws_a_fixed_number, is_long=True)
def clients_are_poisson_sampled_where_that_is_accounted():
    data = constant_clients(*[0.0] * 40)
    drawn = participants.participation(sampling.poisson(), 40, 10)
    assert isinstance(drawn.event(dpa.GaussianDpEvent(1.0)), dpa.PoissonSampledDpEvent)
    _, record, _ = run(client_level(expected=10.0), data, num_rounds=200, participation=drawn)
    sizes = record.num_drawn
    # Binomial(40, 1/4): mean 10, variance 7.5; five standard errors over 200 rounds.
    assert np.mean(sizes) == pytest.approx(10, abs=5 * np.sqrt(7.5 / 200))
    assert np.var(sizes) == pytest.approx(7.5, rel=5 * np.sqrt(2 / 200))


@clause(_draws_a_fixed_number, is_long=True)
def records_are_poisson_sampled_where_that_is_accounted():
    data = constant_clients(*[0.0] * 300, size=16)
    algorithm = record_level(batch_size=4.0)
    *_, info = run(algorithm, data, chunk=100)
    # 4,800 coins with probability 1/4, of which one round shows the sum; and each client's own.
    assert info.training.num_examples[0] == pytest.approx(1200, abs=5 * np.sqrt(4800 * 3 / 16))
    draw = sampling.poisson().draw
    each = jax.jit(jax.vmap(lambda k: jnp.sum(draw((), k, 0, 16, 4.0, 16, 16)[1].is_real)))
    counts = np.asarray(each(jax.random.split(jax.random.key(0), 2000)))
    assert np.var(counts) == pytest.approx(3.0, rel=5 * np.sqrt(2 / 2000))


@in_place_of(sampling, "shuffled")
def _claims_poisson_for_epochs(build):
    return made(build()._replace(analysis=sampling.poisson().analysis))


@clause(_claims_poisson_for_epochs, is_quick_with_bug=True)
def shuffled_epochs_get_no_epsilon():
    with pytest.raises(ValueError, match="shuffled"):
        sampling.shuffled().event(dpa.GaussianDpEvent(1.0), 100, 10)


@in_place_of(sampling, "poisson")
def _hides_the_capacity(build, capacity=None):
    return made(build(capacity)._replace(analysis=build().analysis))


@clause(_hides_the_capacity, is_quick_with_bug=True)
def a_capacity_is_accounted_as_truncation():
    drawn = participants.participation(sampling.poisson(capacity=3), 20, 2)
    event = drawn.event(dpa.GaussianDpEvent(1.0))
    assert isinstance(event, dpa.dp_event.TruncatedSubsampledGaussianDpEvent)
    assert event.truncated_batch_size == 3


# 4. Padding is masked, and an empty cohort is noised.


@in_place_of(gradients, "clipped")
def _counts_padding(build, *args, **options):
    rule = build(*args, **options)

    def micro_batch(params, batch, is_real, key, config):
        return rule.micro_batch(params, batch, jnp.ones_like(is_real), key, config)

    return rule._replace(micro_batch=micro_batch)


@clause(_counts_padding, is_long=True)
def padding_is_not_counted():
    sizes = (1, 7, 3)
    data = clients_of(*[np.full((n, NUM_PARAMETERS), -1.0) for n in sizes])
    algorithm = record_level(local_only, batch_size=8.0)
    rows = np.asarray(run(algorithm, data, chunk=3)[0].clients)
    expected = np.array(sizes)[:, None] / 8 / np.sqrt(NUM_PARAMETERS)
    np.testing.assert_allclose(rows, np.broadcast_to(expected, rows.shape), rtol=1e-5)


def _skips_empty_rounds(mean, make_mechanism, expected):
    def combine(state, numbers, total, close):
        before, count = total
        state, aggregate, info = mean.combine(state, numbers, before, close)
        return state, trees.scale(aggregate, jnp.minimum(count, 1)), info

    return mean._replace(
        contribute=lambda *args: (mean.contribute(*args), jnp.float32(1)), combine=combine
    )


@clause(changed_mean(_skips_empty_rounds), is_long=True)
def an_empty_cohort_is_noised():
    drawn = participants.participation(sampling.poisson(), 3, 1e-3)
    data = constant_clients(0.0, 0.0, 0.0)
    state, record, _ = run(client_level(0.5, 3.0), data, participation=drawn)
    assert record.num_drawn[0] == 0
    assert_stddev(state.server.params, 0.5 * 3.0 / 4.0)


# 5. What is not finite contributes zero and is seen; a zero update stays zero.


def _clips_naively(monkeypatch):
    def naive(tree, clip_norm):
        norm = trees.l2_norm(jax.tree.leaves(tree))
        return trees.scale(tree, jnp.minimum(norm, clip_norm) / norm), norm

    monkeypatch.setitem(clipping.METHODS, "global", naive)


@clause(_clips_naively, is_quick_with_bug=True)
def nan_does_not_pass_the_clip():
    for bad in (np.nan, np.inf, -np.inf):
        tree = {"a": jnp.array([1.0, bad]), "b": jnp.ones(3)}
        clipped, _ = mechanisms.gaussian(1.0, 0.0).clip(tree)
        np.testing.assert_array_equal(np.concatenate(jax.tree.leaves(clipped)), np.zeros(5))


def _sees_nothing(monkeypatch):
    monkeypatch.setattr(engine_round.trees, "can_be_summed", lambda tree: jnp.bool_(True))


@clause(_sees_nothing, is_long=True)
def a_client_that_is_not_finite_contributes_zero_and_is_counted():
    bad, zero = constant_clients(-1.0, np.nan, -1.0, np.inf), constant_clients(-1.0, 0.0, -1.0, 0.0)
    state, record, _ = run(client_level(), bad)
    np.testing.assert_array_equal(state.server.params, released(client_level(), zero))
    assert record.count(Fate.NOT_FINITE)[0] == 2
    # Their weight is nothing either: what is left is the mean of the two others.
    state, record, _ = run(client_level(aggregator=weighted_mean()), bad)
    np.testing.assert_array_equal(state.server.params, 1.0)
    assert record.count(Fate.NOT_FINITE)[0] == 2


@clause(_clips_naively)
def a_zero_update_stays_zero():
    clipped, norm = mechanisms.gaussian(1.0, 1.0).clip({"a": jnp.zeros(3)})
    np.testing.assert_array_equal(clipped["a"], np.zeros(3))
    assert norm == 0
    after = released(client_level(), constant_clients(0.0, -1.0))
    assert np.all(np.isfinite(after)) and np.all(after > 0)


# 6. Chunks are performance only, and noise is added once.


def _noises_every_client(mean, make_mechanism, expected):
    def contribute(state, numbers, update, sender):
        bounded, clipped = mean.contribute(state, numbers, update, sender)
        noised = of_numbers(make_mechanism, numbers).add_noise(jax.random.key(0), bounded)
        return noised, clipped

    return mean._replace(contribute=contribute)


@clause(changed_mean(_noises_every_client), is_long=True)
def noise_is_added_once_whatever_the_chunks():
    data = constant_clients(*[0.0] * 6)
    one, three = (released(client_level(0.5, 3.0), data, chunk=chunk) for chunk in (1, 3))
    assert_stddev(one, 0.5 * 3.0 / 4.0)
    np.testing.assert_allclose(one, three, rtol=0, atol=1e-6)


# 7. Sums, norms and noise in float32 or better.


def _stays_narrow(monkeypatch):
    monkeypatch.setattr(trees, "at_least_float32", lambda x: x)


@clause(_stays_narrow, is_long=True)
def narrow_floats_are_clipped_and_noised_in_float32():
    tree = jnp.full(NUM_PARAMETERS, 0.37, jnp.bfloat16)
    mechanism = mechanisms.gaussian(1.0, 1e-3)
    clipped, _ = mechanism.clip(tree)
    assert np.linalg.norm(np.asarray(clipped, np.float64)) <= 1 + 1e-6
    noised = mechanism.add_noise(jax.random.key(0), jnp.ones(NUM_PARAMETERS, jnp.bfloat16))
    assert noised.dtype == jnp.float32
    assert_stddev(noised, 1e-3)


# 8. Examples that mix are refused under per-example clipping.


def _lets_batch_norm_through(monkeypatch):
    monkeypatch.setattr(gradients.checks, "require", lambda *args: None)


@clause(_lets_batch_norm_through, is_quick_with_bug=True)
def models_that_mix_examples_are_refused():
    model = linear_model()._replace(mixes_examples=True)
    with pytest.raises(ValueError, match="replace batch norm by group norm"):
        gradients.clipped(model)


# 9. What is exact is marked as not private.


def _marks_nothing(monkeypatch):
    monkeypatch.setattr(statements, "_NOT_PRIVATE", ())


@clause(_marks_nothing, is_quick_with_bug=True)
def statements_name_what_is_exact_and_not_private():
    ledger = Ledger(unit="client")
    ledger.charge(dpa.GaussianDpEvent(1.0))
    data = statements.statement(ledger, 1e-5)
    for word in ("losses", "accuracies", "norms"):
        assert any(word in line for line in data["not_private"])
        assert word in statements.in_words(data)


# 10. Keys are folded from purpose, round, client and step.


def _folds_without(purpose, keep):
    """A bug in the keys of the engine: of what is folded behind a purpose only some is kept."""

    @in_place_of(engine_round, "fold")
    def put_in(fold, key, *path):
        if path and path[0] == purpose:
            key, path = keep(key, path)
        return fold(key, *path)

    return put_in


NOISED = {"noise_multiplier": 1.0}


@clause(_folds_without(keys.Purpose.CLIENT, lambda key, path: (jax.random.key(0), path)))
def two_seeds_do_not_share_client_keys():
    data = constant_clients(0.0)
    one, other = (released(record_level(**NOISED), data, seed=seed) for seed in (0, 1))
    assert_stddev(one - other, np.sqrt(2) / 8)


@clause(_folds_without(keys.Purpose.CLIENT, lambda key, path: (key, path[:2])), is_long=True)
def clients_do_not_share_noise():
    rows = run(record_level(local_only, **NOISED), constant_clients(0.0, 0.0))[0].clients
    assert_stddev(rows[0] - rows[1], np.sqrt(2) / 8)


@clause(_folds_without(keys.Purpose.CENTRAL_NOISE, lambda key, path: (key, path[:1])))
def rounds_do_not_share_noise():
    data = constant_clients(0.0)
    after = released(client_level(1.0, 1.0, expected=1.0), data, num_rounds=4)
    assert_stddev(after, np.sqrt(4))


@clause(
    _folds_without(keys.Purpose.CLIENT, lambda key, path: (key, path[:1] + path[2:])), is_long=True
)
def rounds_of_a_client_do_not_share_noise():
    after = released(record_level(**NOISED), constant_clients(0.0), num_rounds=4)
    assert_stddev(after, np.sqrt(4) / 8)


# 11. Resuming loses no state of a mechanism.


@in_place_of(Checkpoints, "restore")
def _starts_over(restore, self, like, hyper):
    state, hyper, extra = restore(self, like, hyper)
    return state._replace(aggregator=like.aggregator), hyper, extra


@clause(_starts_over, is_long=True)
def the_state_of_a_mechanism_survives_a_resume(tmp_path):
    rule = make_adaptive_clipping(4.0, initial_clip_norm=0.01, count_stddev=2.0)
    algorithm = client_level(aggregator=adaptive_gaussian_mean(rule, 1.0))
    data, key = constant_clients(-1.0, -1.0), jax.random.key(KEY)
    sim = simulation(algorithm, data, participants.participation(sampling.full_participation(), 2))
    whole, *_ = sim.run(sim.init(key), key, 3)
    half, *_ = sim.run(sim.init(key), key, 2)
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(sim.portable(half), sim.hyper, {})
        restored, hyper, _ = checkpoints.restore(sim.portable(sim.init(key)), sim.hyper)
    resumed, *_ = sim.run(restored, key, 1, hyper)
    chex.assert_trees_all_equal(resumed, whole)


# Adaptive clipping follows the quantile and not its mirror image.


@in_place_of(AdaptiveClipping, "step")
def _inverted(step, self, key, clip_norm, total):
    after, unclipped = step(self, key, clip_norm, total)
    return clip_norm * clip_norm / after, unclipped


@clause(_inverted, is_long=True)
def adaptive_clipping_grows_where_all_are_clipped():
    rule = make_adaptive_clipping(4.0, initial_clip_norm=0.01, count_stddev=1e-3)
    algorithm = client_level(aggregator=adaptive_gaussian_mean(rule, 1e-4))
    data = constant_clients(*[-1.0] * 4)
    *_, info = run(algorithm, data, num_rounds=20)
    # All clipped: every round multiplies by exp(0.2 · 0.5).
    expected = 0.01 * np.exp(0.1 * np.arange(20))
    np.testing.assert_allclose(info.aggregator["clip_norm"], expected, rtol=0.01)


@in_place_of(clipping.random_bits, "normal")
def _count_without_noise(normal, key, shape=(), dtype=jnp.float32):
    return jnp.zeros(()) if shape == () else normal(key, shape, dtype)


@clause(_count_without_noise)
def the_count_of_adaptive_clipping_is_noised():
    rule = make_adaptive_clipping(4.0, count_stddev=2.0)
    step = jax.jit(jax.vmap(lambda key: rule.step(key, 1.0, jnp.float32(0))[1]))
    shares = step(jax.random.split(jax.random.key(0), 4000))
    assert_stddev(shares, 2.0 / 4.0)


def call(check: Callable[..., None], tmp_path: Any) -> None:
    takes_folder = "tmp_path" in check.__code__.co_varnames[: check.__code__.co_argcount]
    (partial(check, tmp_path) if takes_folder else check)()


@pytest.mark.parametrize(
    "it",
    [pytest.param(it, marks=telling if it.is_long else ()) for it in CLAUSES],
    ids=[it.name for it in CLAUSES],
)
def test_holds(it, tmp_path):
    call(it.check, tmp_path)


@pytest.mark.parametrize(
    "it",
    [pytest.param(it, marks=() if it.is_quick_with_bug else telling) for it in CLAUSES],
    ids=[it.name for it in CLAUSES],
)
def test_is_seen_to_fail_with_its_bug_put_in(it, tmp_path, monkeypatch):
    it.put_in(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        call(it.check, tmp_path)
