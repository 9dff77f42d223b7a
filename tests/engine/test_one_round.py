"""What the step of a wrapper may not do where privacy is claimed; each is refused by tracing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from own_draws_worker import in_turn
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer, private_trainer
from test_own_draws import KEY, NOISE, SAMPLERS, bound, with_mean

from fedjax_dp import algorithms
from fedjax_dp.core import trees
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    Change,
    Fate,
    Wrapper,
    clocked,
    compute_seconds,
    examples_of,
    federation,
    latencies,
    several_servers,
    wrapping,
)
from fedjax_dp.engine.layout import Layout
from fedjax_dp.privacy import banded_noise, make_plan
from fedjax_dp.server import correlated_gaussian_mean, discrete_mean, gaussian_mean

TIMED = {
    "latencies": latencies(["a"], [[0.1]], ["a"] * NUM_CLIENTS, "a"),
    "compute": compute_seconds(NUM_CLIENTS, per_step=0.1),
    "server_seconds": 0.0,
}
MINE = Wrapper("mine", frozenset({Change.SERVER_STEP}))


@functools.cache
def banded():
    """A federation whose aggregator keeps noise of later rounds."""
    mean = correlated_gaussian_mean(banded_noise(6, 3, min_separation=3), 1.0, NOISE, 2)
    return with_mean(mean, sampling.min_separated(3))


@functools.cache
def data():
    return examples_of(make_data())


def traced(fed):
    """Traces a round."""
    return jax.eval_shape(fed.run_round, fed.init(KEY), fed.hyper, data(), KEY)


def stepping(step, wrapper=MINE, *, declares=True):
    """A wrapper with a step that receives the wrapped one."""

    def wrap(fed):
        def own(state, hyper, examples, cohort, key, layout=Layout()):
            return step(fed.step, state, hyper, examples, cohort, key)

        return fed.wrapped(wrapper, step=own) if declares else fed._replace(step=own)

    return wrap


def later_model(state, after):
    """The state of a round, for the same round again."""
    return after._replace(round=state.round)


def twice(run, state, hyper, examples, cohort, key):
    after, _, _ = run(state, hyper, examples, cohort, key)
    return run(later_model(state, after), hyper, examples, cohort, key)


def in_a_loop(run, state, hyper, examples, cohort, key):
    def again(_, now):
        return later_model(state, run(now, hyper, examples, cohort, key)[0])

    _, record, info = jax.eval_shape(run, state, hyper, examples, cohort, key)
    record, info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (record, info))
    return jax.lax.fori_loop(0, 3, again, state), record, info


def under_vmap(run, state, hyper, examples, cohort, key):
    keys = jax.random.split(key, 2)
    both = jax.vmap(lambda key: run(state, hyper, examples, cohort, key))(keys)
    return jax.tree.map(lambda x: x[0], both)


def in_both_branches(run, state, hyper, examples, cohort, key):
    def more(state):
        return twice(run, state, hyper, examples, cohort, key)

    def less(state):
        return run(state, hyper, examples, cohort, key)

    return jax.lax.cond(state.round > 2, more, less, state)


def with_one_key(run, state, hyper, examples, cohort, key):
    return run(state, hyper, examples, cohort, jax.random.key(0))


def in_round_0(run, state, hyper, examples, cohort, key):
    return run(state._replace(round=jnp.int32(0)), hyper, examples, cohort, key)


def with_less_noise(run, state, hyper, examples, cohort, key):
    less = jax.tree.map(lambda x: x * 0.5, hyper.aggregator)
    return run(state, hyper._replace(aggregator=less), examples, cohort, key)


def with_others(run, state, hyper, examples, cohort, key):
    return run(state, hyper, examples, cohort._replace(ids=cohort.ids + 1), key)


def of_the_first_alone(run, state, hyper, examples, cohort, key):
    is_first = jnp.arange(len(cohort.fate)) == jnp.argmax(cohort.is_drawn)
    fate = jnp.where(is_first, cohort.fate, Fate.LATE).astype(cohort.fate.dtype)
    return run(state, hyper, examples, cohort._replace(fate=fate), key)


def moved(after, number):
    server = jax.tree.map(lambda x: x + number.astype(x.dtype), after.server)
    return after._replace(server=server)


def by_examples(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return moved(after, jnp.sum(jax.tree.leaves(examples)[0])), record, info


def by_metrics(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return moved(after, info.training.train_loss), record, info


def by_the_number_drawn(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return moved(after, jnp.sum(cohort.fate == Fate.CONTRIBUTED)), record, info


def of_two_models(run, state, hyper, examples, cohort, key):
    def one(scale):
        server = jax.tree.map(lambda x: (x * scale).astype(x.dtype), state.server)
        return run(state._replace(server=server), hyper, examples, cohort, key)

    return jax.tree.map(lambda x: x[0], jax.vmap(one)(jnp.array([1.0, 2.0])))


def differentiated(run, state, hyper, examples, cohort, key):
    def of_server(server):
        return run(state._replace(server=server), hyper, examples, cohort, key)

    is_float = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), state.server)
    tangents = jax.tree.map(
        lambda x, moves: jnp.ones_like(x) if moves else np.zeros(x.shape, jax.dtypes.float0),
        state.server,
        is_float,
    )
    (after, record, info), (moved_by, *_) = jax.jvp(of_server, (state.server,), (tangents,))
    server = jax.tree.map(
        lambda x, t, moves: x + t if moves else x, after.server, moved_by.server, is_float
    )
    return after._replace(server=server), record, info


def with_the_records_of_others(run, state, hyper, examples, cohort, key):
    swapped = jax.tree.map(lambda x: x[::-1], examples)
    return run(state, hyper, swapped, cohort, key)


def from_a_model_of_examples(run, state, hyper, examples, cohort, key):
    return run(moved(state, jnp.sum(jax.tree.leaves(examples)[0])), hyper, examples, cohort, key)


def with_a_rate_of_examples(run, state, hyper, examples, cohort, key):
    rate = hyper.local.learning_rate + jnp.sum(jax.tree.leaves(examples)[0])
    local = hyper.local._replace(learning_rate=rate)
    return run(state, hyper._replace(local=local), examples, cohort, key)


def of_a_cheaper_stage(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return after, record._replace(stage=jnp.int32(0)), info


def by_the_state_of_the_aggregator(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return moved(after, sum(jnp.sum(x) for x in jax.tree.leaves(after.aggregator))), record, info


ONCE, PASSED, RELEASED = "at most once a round", "pass on what the round", "compute nothing of the"
REFUSED = [
    (twice, ONCE),
    (in_a_loop, ONCE),
    (under_vmap, ONCE),
    (in_both_branches, ONCE),
    (with_one_key, rf"{PASSED}.*a different key"),
    (in_round_0, rf"{PASSED}.*a different state\.round"),
    (with_less_noise, rf"{PASSED}.*a different hyper\.aggregator"),
    (with_others, rf"{PASSED}.*a different cohort.*ids"),
    (of_the_first_alone, rf"{PASSED}.*a different cohort.*fate"),
    (by_examples, RELEASED),
    (by_metrics, RELEASED),
    (by_the_number_drawn, RELEASED),
    (of_two_models, ONCE),
    (differentiated, RELEASED),
    (with_the_records_of_others, rf"{PASSED}.*a different examples"),
    (from_a_model_of_examples, rf"{RELEASED}.*of state\.server"),
    (with_a_rate_of_examples, rf"{RELEASED}.*of hyper\.local\.learning_rate"),
    (of_a_cheaper_stage, "return stage and digest of the record"),
]


# Some of every kind: calls, arguments that differ, values that are read, what is returned.
SOON = [REFUSED[i] for i in (0, 2, 4, 6, 7, 9, 11, 13, 14, 17)]


@pytest.mark.parametrize(("step", "rule"), later(REFUSED, but=SOON, mark=telling))
def test_a_step_that_costs_more_than_its_round_is_refused(step, rule):
    with pytest.raises(
        ValueError, match=f"the step of a wrapper, where privacy is claimed.*{rule}"
    ):
        traced(stepping(step)(bound()))


def test_a_step_that_declares_nothing_or_is_wrapped_is_refused_too():
    with pytest.raises(ValueError, match=ONCE):
        traced(stepping(twice, declares=False)(bound()))
    inside = stepping(twice)(bound())
    for outer in (
        lambda fed: clocked(fed, **TIMED),
        stepping(lambda run, *inputs: run(*inputs), MINE._replace(name="another")),
    ):
        with pytest.raises(ValueError, match=ONCE):
            traced(outer(inside))


def test_wrappers_of_the_package_go_around_none_that_declares_nothing():
    assert all(wrapper.refusal(wrapping.UNDECLARED) for wrapper in wrapping.BUILT_IN)


def test_a_step_that_is_wrapped_by_views_alone_is_refused_too():
    fed = stepping(twice, declares=False)(bound())
    with pytest.raises(ValueError, match=ONCE):
        traced(fed.wrapped(MINE, views=fed.views))


def with_an_aggregator_of_examples(run, state, hyper, examples, cohort, key):
    number = jnp.sum(jax.tree.leaves(examples)[0])
    aggregator = jax.tree.map(lambda x: x + number.astype(x.dtype), state.aggregator)
    return run(state._replace(aggregator=aggregator), hyper, examples, cohort, key)


def test_noise_that_an_aggregator_keeps_is_not_released():
    fed = banded()
    with pytest.raises(ValueError, match=RELEASED):
        traced(stepping(by_the_state_of_the_aggregator)(fed))
    with pytest.raises(ValueError, match=rf"{PASSED}.*a different state\.aggregator"):
        traced(stepping(with_an_aggregator_of_examples)(fed))


def with_empty_noise(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    return after._replace(aggregator=jax.tree.map(jnp.zeros_like, after.aggregator)), record, info


def with_old_noise_by_examples(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    is_old = jnp.sum(jax.tree.leaves(examples)[0]) > 0
    aggregator = trees.where(is_old, state.aggregator, after.aggregator)
    return after._replace(aggregator=aggregator), record, info


@pytest.mark.parametrize("step", [with_empty_noise, with_old_noise_by_examples])
def test_noise_that_an_aggregator_keeps_stays_as_its_round_left_it(step):
    fed = banded()
    with pytest.raises(ValueError, match=r"return client states and what .*state\.aggregator"):
        traced(stepping(step)(fed))
    traced(stepping(skipping)(fed))


def without_noise_of_others(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    (others,) = after.outer
    empty = jax.tree.map(jnp.zeros_like, others.aggregator)
    return after._replace(outer=(others._replace(aggregator=empty),)), record, info


def by_noise_of_others(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    noise = jax.tree.leaves(state.outer[0].aggregator)
    return moved(after, sum(jnp.sum(jnp.asarray(x, jnp.float32)) for x in noise)), record, info


def passing_no_noise_of_others(run, state, hyper, examples, cohort, key):
    (others,) = state.outer
    empty = others._replace(aggregator=jax.tree.map(jnp.zeros_like, others.aggregator))
    return run(state._replace(outer=(empty,)), hyper, examples, cohort, key)


@functools.cache
def noisy_servers():
    """Two servers, whose aggregators keep noise of later rounds."""
    return several_servers(banded(), servers=[0, 1, 0, 1, 1, 1], exchange_every=2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (without_noise_of_others, r"return client states and what .*state\.outer\[-1\]"),
        (by_noise_of_others, RELEASED),
        (passing_no_noise_of_others, rf"{PASSED}.*a different state\.outer\[-1\]"),
    ],
)
def test_noise_that_the_aggregators_of_other_servers_keep_is_theirs(step, message):
    fed = noisy_servers()
    with pytest.raises(ValueError, match=message):
        traced(stepping(step)(fed))
    traced(stepping(skipping)(fed))


def test_the_mean_of_servers_is_read_from_their_models_alone():
    fed = noisy_servers()
    state = fed.init(KEY)
    before = fed.shared(state)
    passed_on = fed._replace(views=fed.views._replace(personal=None))
    declared = fed.wrapped(MINE, views=fed.views)
    for other in (passed_on, declared):
        jax.tree.map(np.testing.assert_array_equal, other.shared(state), before)

    def leaking(state):
        noise = jax.tree.leaves(state.outer[0].aggregator)
        return jax.tree.map(lambda x: x + jnp.sum(noise[0]), state.server.params)

    views = fed.views._replace(shared=fed.views.shared._replace(read=leaking))
    with pytest.raises(ValueError, match=r"views\.shared must read no states of clients"):
        fed.wrapped(MINE, views=views).shared(state)


def test_client_states_stay_as_their_round_left_them():
    model = make_model()
    algorithm = algorithms.scaffold(model, private_trainer(model), num_clients=NUM_CLIENTS)
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    fed = federation(algorithm, make_data(), everyone)

    def of_examples(run, state, hyper, examples, cohort, key):
        after, record, info = run(state, hyper, examples, cohort, key)
        number = jnp.sum(jax.tree.leaves(examples)[0])
        clients = jax.tree.map(lambda x: x + number.astype(x.dtype), after.clients)
        return after._replace(clients=clients), record, info

    with pytest.raises(ValueError, match=r"return client states and what .*state\.clients"):
        traced(stepping(of_examples)(fed))
    traced(stepping(skipping)(fed))


def test_rounds_beside_the_one_that_is_wrapped_are_not_released():
    """Of a federation inside it, or of another one with less noise."""
    fed, cheaper = bound(), with_mean(gaussian_mean(1.0, 0.01, 2))
    timed = clocked(fed, **TIMED)

    def of_the_inner(run, state, hyper, examples, cohort, key):
        first, *others = state.outer
        inner = state._replace(outer=tuple(others))
        after, record, info = twice(fed.step, inner, hyper, examples, cohort, key)
        return after._replace(outer=(first, *after.outer)), record, info

    def of_another(run, *inputs):
        return cheaper.step(*inputs)

    with pytest.raises(ValueError, match=RELEASED):
        traced(stepping(of_the_inner)(timed))
    with pytest.raises(ValueError, match=r"return client states|compute nothing"):
        traced(stepping(of_another)(fed))


def counting(step, name="counting"):
    """A wrapper with a state of its own around another step."""

    def wrap(fed):
        def init(key, layout=Layout()):
            state = fed.init(key, layout)
            return state._replace(outer=(jnp.int32(0), *state.outer))

        def own(state, hyper, examples, cohort, key, layout=Layout()):
            count, *others = state.outer
            inner = state._replace(outer=tuple(others))
            after, record, info = step(fed.step, inner, hyper, examples, cohort, key)
            return after._replace(outer=(count + 1, *after.outer)), record, info

        return fed.wrapped(MINE._replace(name=name), init=init, step=own)

    return wrap


def test_wrappers_with_states_of_their_own_go_around_each_other():
    timed = clocked(bound(), **TIMED)
    traced(counting(skipping)(timed))
    traced(clocked(counting(skipping)(counting(averaging, "inner")(bound())), **TIMED))
    with pytest.raises(ValueError, match=ONCE):
        traced(counting(twice)(counting(skipping, "inner")(timed)))


def test_a_draw_reads_the_state_of_its_own_wrapper_inside_others():
    fed = in_turn(bound(SAMPLERS["full_participation"]))
    outside = counting(skipping)(clocked(fed, **TIMED))
    state = outside.init(KEY)
    *others, _ = state.outer
    state = state._replace(outer=(*others, jnp.int32(2)))
    cohort = outside.cohorts.draw(state, outside.hyper, KEY)
    assert set(map(int, cohort.ids[cohort.is_drawn])) == {2, 3}
    traced(outside)


def test_views_read_the_state_of_their_own_wrapper_inside_others():
    model = make_model()
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    plain = federation(algorithms.fedavg(model, plain_trainer(model)), make_data(), everyone)
    several = several_servers(plain, servers=[0, 1, 0, 1, 1, 1], exchange_every=2)
    timed = clocked(several, **TIMED)
    state = timed.init(KEY)
    inner = several.init(KEY)
    jax.tree.map(np.testing.assert_array_equal, timed.shared(state), several.shared(inner))
    params = jax.tree.map(lambda x: x + 1, timed.shared(state))
    after = timed.views.shared.write(state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, timed.shared(after), params)
    client = examples_of(make_data()).client(1)
    found = jax.tree.map(jnp.asarray, timed.personal(after, client))
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize("declares", [True, False])
def test_the_shared_model_of_a_wrapper_shows_no_states_of_clients(declares):
    model = make_model()
    algorithm = algorithms.scaffold(model, private_trainer(model), num_clients=NUM_CLIENTS)
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    fed = federation(algorithm, make_data(), everyone)

    def with_view(read):
        views = fed.views._replace(shared=fed.views.shared._replace(read=read))
        return fed.wrapped(MINE, views=views) if declares else fed._replace(views=views)

    def of_clients(state):
        return jax.tree.map(lambda x: x[0], state.clients.control)

    state = fed.init(KEY)
    read = with_view(fed.shared).shared
    jax.tree.map(np.testing.assert_array_equal, read(state), fed.shared(state))
    timed = clocked(with_view(of_clients), **TIMED)
    for leaks, given in ((with_view(of_clients), state), (timed, timed.init(KEY))):
        with pytest.raises(ValueError, match=r"views\.shared must read no states of clients"):
            leaks.shared(given)


def test_noise_in_shares_needs_the_message_of_each_client():
    model = make_model()
    structure = jax.eval_shape(model.init, KEY)
    plan = make_plan(4, 1.0, 1.0, num_clients=NUM_CLIENTS, num_shares=NUM_CLIENTS, bits=16)
    mean = discrete_mean(structure, plan, NUM_CLIENTS)
    shares = with_mean(mean, SAMPLERS["full_participation"])
    with pytest.raises(ValueError, match=rf"{PASSED}.*a different cohort.*fate"):
        traced(stepping(of_the_first_alone)(shares))
    late = shares.cohorts.with_fates(lambda state, hyper, cohort: Fate.LATE)
    with pytest.raises(ValueError, match=f"the updates of at least {NUM_CLIENTS} clients"):
        shares.wrapped(MINE._replace(changes=frozenset({Change.COHORTS})), cohorts=late)


def test_a_step_without_privacy_may_do_so():
    model = make_model()
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    plain = federation(algorithms.fedavg(model, plain_trainer(model)), make_data(), everyone)
    for step in (twice, by_metrics, with_one_key):
        traced(stepping(step)(plain))


def skipping(run, state, hyper, examples, cohort, key):
    """A round that is left out at times, as a branch and under `jit`."""
    after, record, info = jax.jit(run)(state, hyper, examples, cohort, key)
    is_skipped = state.round % 2 == 1
    after = jax.lax.cond(is_skipped, lambda: state, lambda: after)
    return after._replace(round=state.round + 1), record, info


def averaging(run, state, hyper, examples, cohort, key):
    after, record, info = run(state, hyper, examples, cohort, key)
    server = jax.tree.map(lambda a, b: ((a + b) / 2).astype(a.dtype), after.server, state.server)
    metrics = {**info.server, "loss": info.training.train_loss}
    return after._replace(server=server), record, info._replace(server=metrics)


def with_another_rate(run, state, hyper, examples, cohort, key):
    local = hyper.local._replace(learning_rate=hyper.local.learning_rate / (1 + state.round))
    return run(state, hyper._replace(local=local), examples, cohort, key)


@pytest.mark.parametrize("step", [skipping, averaging, with_another_rate])
def test_a_step_that_only_uses_what_is_released_is_let_through(step):
    traced(stepping(step)(bound()))
    traced(clocked(stepping(step)(bound()), **TIMED))


@telling
def test_a_wrapped_round_is_the_round():
    """Also where it is called under `jit`, whose cache knows nothing of a trial."""
    fed = bound(SAMPLERS["cyclic"])
    state = fed.init(KEY)
    expected, *_ = jax.jit(fed.run_round)(state, fed.hyper, data(), KEY)
    wrapped = stepping(skipping)(fed)
    found, *_ = jax.jit(wrapped.run_round)(state, wrapped.hyper, data(), KEY)
    jax.tree.map(np.testing.assert_array_equal, found.server, expected.server)
    moves = jax.tree.map(lambda a, b: np.any(a != b), found.server, state.server)
    assert any(jax.tree.leaves(moves))
    skipped, *_ = jax.jit(wrapped.run_round)(found, wrapped.hyper, data(), KEY)
    jax.tree.map(np.testing.assert_array_equal, skipped.server, found.server)
    assert skipped.round == 2


@pytest.mark.parametrize("step", [of_the_first_alone, by_the_number_drawn])
def test_cohorts_that_are_public_may_be_read(step):
    traced(stepping(step)(bound(SAMPLERS["cyclic"])))


def test_a_rule_is_asked_about_one_client_at_a_time():
    """One client displaces no other, which would cost more than the sampler's price."""
    fed = bound()
    state = fed.init(KEY)
    plain = fed.cohorts.draw(state, fed.hyper, jax.random.key(3))
    assert np.sum(plain.is_drawn) >= 2

    def first_of(cohort):
        return jnp.where(jnp.arange(len(cohort.ids)) == 0, Fate.CONTRIBUTED, Fate.LATE)

    late = fed.cohorts.with_fates(lambda state, hyper, cohort: first_of(cohort))
    least = fed.cohorts.thinned(lambda round_index, clients: clients == jnp.min(clients))
    for cohorts in (late, least):
        drawn = cohorts.draw(state, fed.hyper, jax.random.key(3))
        np.testing.assert_array_equal(drawn.fate, plain.fate)


def test_rules_say_what_they_must_return_and_may_read():
    fed = bound()
    state = fed.init(KEY)
    for keeps in (lambda round_index, clients: jnp.ones(3, bool), lambda round_index, clients: 1.0):
        with pytest.raises(ValueError, match="keeps must return a Boolean for each client"):
            fed.cohorts.thinned(keeps).draw(state, fed.hyper, KEY)
    counter = fed.cohorts.with_fates(lambda state, hyper, cohort: state.outer[0][cohort.ids])
    with pytest.raises(ValueError, match="its round unless reads_state is true"):
        counter.draw(state, fed.hyper, KEY)


def test_a_draw_returns_clients_by_their_indices():
    fed = bound(SAMPLERS["cyclic"])
    drawn = fed.cohorts.given(lambda state, *_: jnp.array([4, -1])).draw(
        fed.init(KEY), fed.hyper, KEY
    )
    np.testing.assert_array_equal(np.asarray(drawn.ids)[np.asarray(drawn.is_drawn)], [4])
    for wrong in (jnp.arange(3), jnp.zeros(2), 1, [0, 1]):
        with pytest.raises(ValueError, match="draw must return a cohort, or indices of at most 2"):
            fed.cohorts.given(lambda state, *_, wrong=wrong: wrong).draw(
                fed.init(KEY), fed.hyper, KEY
            )
