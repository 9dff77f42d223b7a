"""A federation as a value: transformed, swept, wrapped, viewed, laid out on many devices."""

import functools
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt
from cases import CASES, quick_first
from marks import later, telling
from references import PLAIN, reference
from small_problem import (
    NUM_CLIENTS,
    ROUNDS,
    assert_same_state,
    make_data,
    make_model,
    plain_trainer,
    snapshot,
    theta_of,
)

from fedjax_dp.algorithms import fedavg
from fedjax_dp.algorithms.base import ClientState, Stages, Views
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    ExecutionConfig,
    Fate,
    Layout,
    PrivacyAccounting,
    compile_federation,
    federation,
)
from fedjax_dp.engine.cohort import _shared_out, draw_cohort
from fedjax_dp.engine.execution.round_loop import after_host_step
from fedjax_dp.engine.facts import examples_of, population_of
from fedjax_dp.engine.record import compact, joined
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server import Summed, discrete_mean
from fedjax_dp.server.base import stateless

KEY = jax.random.key(7)
SEEDS, RATES, NOISES = (3, 4), (0.5, 1.5), (0.4, 1.6)


def points(hyper):
    """Seeds by learning rates by noise multipliers, with whichever noise there is."""
    for seed, rate, noise in itertools.product(SEEDS, RATES, NOISES):
        local = hyper.local._replace(learning_rate=rate * hyper.local.learning_rate)
        aggregator = dict(hyper.aggregator)
        if local.noise_multiplier is not None:
            local = local._replace(noise_multiplier=noise * local.noise_multiplier)
        if "noise_multiplier" in aggregator:
            aggregator["noise_multiplier"] = noise * aggregator["noise_multiplier"]
        numbers = hyper._replace(local=local, aggregator=aggregator)
        yield jax.random.key(seed), jax.tree.map(np.asarray, numbers)


def side_by_side(parts):
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *parts)


@pytest.mark.parametrize(
    "name", later(["fedavg", "dp_fedavg", "scaffold", "r_dpcfl"], soon=["fedavg", "r_dpcfl"])
)
def test_a_sweep_is_one_vmap_of_the_step(name):
    """Every point ends where a run of its own ends; on the host work is done point by point."""
    ref = reference(name)
    fed, examples = ref.sim.federation, jax.device_put(examples_of(ref.case.data()))
    keys, numbers = zip(*points(fed.hyper), strict=True)
    traces = []

    def one(state, hyper, key):
        traces.append(name)
        return fed.run_round(state, hyper, examples, key)

    many = jax.jit(jax.vmap(one))
    every_key, every_hyper = jnp.stack(keys), side_by_side(numbers)
    states, records = jax.jit(jax.vmap(fed.init))(every_key), []
    for done in range(1, ROUNDS + 1):
        states, record, _ = many(states, every_hyper, every_key)
        records.append(record)
        for step in fed.algorithm.stages.host_steps:
            if step.after == done:
                own = [trees.take(states, i) for i in range(len(keys))]
                each = zip(own, numbers, keys, strict=True)
                states = side_by_side([after_host_step(step, *point) for point in each])
    assert len(traces) == 1
    ends, traced = [], []
    for i, (key, hyper) in enumerate(zip(keys, numbers, strict=True)):
        alone, record, _ = ref.sim.run(ref.sim.init(key), key, ROUNDS, hyper)
        assert_same_state(snapshot(trees.take(states, i)), snapshot(alone), atol=1e-6)
        own = [jax.tree.map(lambda x, i=i: np.asarray(x[i])[None], each) for each in records]
        np.testing.assert_array_equal(joined([compact(r) for r in own]).clients, record.clients)
        ends.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(snapshot(alone.server))]))
        traced.append(ref.sim.num_traces())
    # The other points run the program of the first.
    assert len(set(traced)) == 1
    # Points differ, but where there is no noise to be swept.
    expected = len(ends) if name != "fedavg" and name != "scaffold" else len(ends) // 2
    assert len(np.unique(np.round(ends, 6), axis=0)) == expected


@telling
@pytest.mark.xdist_group("algorithm scaffold")
def test_scan_and_make_jaxpr_reach_the_step():
    ref = reference("scaffold")
    fed, examples = ref.sim.federation, jax.device_put(examples_of(ref.case.data()))

    def rounds(state, hyper):
        def body(state, _):
            state, record, info = fed.run_round(state, hyper, examples, ref.key)
            return state, (record, info)

        return jax.lax.scan(body, state, None, length=ROUNDS)

    start = jax.tree.map(jnp.asarray, ref.initial)
    final, (record, info) = jax.jit(rounds)(start, fed.hyper)
    assert_same_state(snapshot(final), ref.final, atol=1e-6)
    # A run keeps the slots that its cohorts fill.
    both = (compact(jax.device_get(record)), info), (ref.record, ref.info)
    left, expected = map(jax.tree.leaves, both)
    for a, b in zip(left, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    step = jax.make_jaxpr(fed.run_round)(start, fed.hyper, examples, ref.key)
    shapes = jax.eval_shape(fed.run_round, start, fed.hyper, examples, ref.key)
    assert [x.shape for x in step.out_avals] == [x.shape for x in jax.tree.leaves(shapes)]
    assert not step.effects and "callback" not in str(step)


def leaves_of(hyper):
    """Every number of a run: its name in errors, where it is, its value and its range."""
    for path, value in jax.tree_util.tree_flatten_with_path(hyper)[0]:
        names = [str(getattr(p, "name", getattr(p, "key", getattr(p, "idx", None)))) for p in path]
        yield names, np.asarray(value)


def range_of(algorithm, names):
    found = {
        "local": algorithm.training.ranges,
        "algorithm": algorithm.numbers.ranges,
        "aggregator": algorithm.aggregator.ranges,
    }
    for name in names:
        found = found.get(name) if found else None
    return found


def with_leaf(hyper, names, value):
    """Puts another value in the place of one number."""
    replaced = iter(value if own == names else None for own, _ in leaves_of(hyper))
    return jax.tree.map(lambda x: x if (new := next(replaced)) is None else new, hyper)


def within(name, value, kind):
    """Another value of the same number inside its range: a fraction wherever one may stand."""
    if get_args(kind)[0] is int:
        largest = [limit.le for limit in get_args(kind)[1:] if isinstance(limit, Le)]
        return value - 1 if value in largest else value + 1
    if name == "selection_epsilon":  # Small enough to turn a choice over.
        return np.float32(1e-3)
    if name == "batch_size":
        return np.maximum(value - 1, 1)
    if name == "threshold":  # Two clients agree or tie, and nothing else lies between.
        return np.float32(0)
    return np.float32(0.75 * value)


def outside(value, kind):
    """Values that the range must refuse, each of the number's own shape, one entry bad."""
    base, *limits = get_args(kind)
    bad = [np.nan, 1.5] if base is int else [np.nan]
    beyond = {
        Gt: lambda x: x.gt,
        Ge: lambda x: x.ge - 0.25,
        Lt: lambda x: x.lt,
        Le: lambda x: x.le + 0.25,
    }
    for number in bad + [beyond[type(limit)](limit) for limit in limits]:
        spoiled = np.array(value, np.float32)
        spoiled[(-1,) * spoiled.ndim] = number
        yield spoiled


# What three rounds of the small problem cannot show. A choice is scored by accuracy, which no bound
# on losses touches; the last choice may come behind the last round.
UNSEEN = ("loss_bound", "num_selections")
UNSEEN_OF = {
    "ae_dpfl": ("divisor",),  # The most voted label is the same at any scale.
    "rc_dpfl": ("selection_epsilon",),  # Its choices are exact.
    "r_dpcfl": ("selection_epsilon",),  # One round of choices; f_cdpfl has two.
    "lottery_fl": ("target",),  # No client prunes twice.
    # One round that is shared, behind a cap of one weight; fed_ltn has three without.
    "jump_start": ("target", "momentum", "prune_rate"),
    "term": ("divisor",),  # Of how many were cut off, which are none.
    "warm_start_averaging": ("num_epochs",),  # Parts of an epoch of one batch are whole steps.
}


@pytest.mark.parametrize("name", quick_first(CASES))
def test_every_number_is_swept_in_one_program_and_kept_in_its_range(name):
    ref = reference(name)
    sim, algorithm = ref.sim, ref.sim.algorithm
    numbers = list(leaves_of(sim.hyper))
    assert len(numbers) == len(jax.tree.leaves(sim.hyper))
    for names, value in numbers:
        kind = range_of(algorithm, names)
        assert kind is not None, f"{names} has no range"
        other = within(names[-1], value, kind)
        assert not np.array_equal(other, value)
        final, _, info = sim.run(ref.initial, ref.key, ROUNDS, with_leaf(sim.hyper, names, other))
        if names[-1] not in (*UNSEEN, *UNSEEN_OF.get(name, ())):
            pairs = zip(
                jax.tree.leaves((snapshot(final), info)),
                jax.tree.leaves((ref.final, ref.info)),
                strict=True,
            )
            assert any(not np.array_equal(a, b) for a, b in pairs), f"{names} decides nothing"
        for bad in outside(value, kind):
            with pytest.raises(ValueError, match=rf"{'.'.join(names[1:])} must "):
                sim.run(ref.initial, ref.key, 1, with_leaf(sim.hyper, names, bad))
    assert sim.num_traces() == 1
    # Traced numbers cannot be checked.
    checked = jax.jit(lambda hyper: (sim.federation.check(hyper), hyper)[1])
    nonsense = jax.tree.map(lambda x: -jnp.ones_like(x), sim.hyper)
    assert jax.tree.structure(checked(nonsense)) == jax.tree.structure(sim.hyper)
    with pytest.raises(ValueError, match="must be"):
        sim.federation.check(nonsense)


@telling
def test_a_whole_number_of_any_kind_stands_for_a_fraction():
    """Built with Python's 1, run with fractions of NumPy, JAX (weakly typed too) and Python."""
    model = make_model()
    algorithm = fedavg(model, local_trainer(model, LocalConfig(1, 3, 1)), server_learning_rate=1)
    joined = participants.participation(sampling.poisson(), NUM_CLIENTS, 3)
    sim, key = (
        compile_federation(federation(algorithm, make_data(), joined), make_data(), PLAIN),
        KEY,
    )
    ends = []
    for rate in (0.5, np.float64(0.5), np.float32(0.5), jnp.asarray(0.5), jnp.float32(0.5), 1):
        hyper = sim.hyper._replace(algorithm={"server_learning_rate": rate})
        ends.append(theta_of(sim.run(sim.init(key), key, 1, hyper)[0].server.params))
    assert sim.num_traces() == 1
    start = theta_of(sim.init(key).server.params)
    for end in ends[:-1]:
        np.testing.assert_allclose(end - start, 0.5 * (ends[-1] - start), rtol=1e-5, atol=1e-7)


def with_fates(fed, fate_of):
    """A federation in which some of the drawn clients drop out, come late or are not announced."""

    def draw(*arguments):
        cohort = fed.cohorts.draw(*arguments)
        fate = jnp.where(cohort.is_drawn, jnp.asarray(fate_of)[cohort.ids], Fate.EMPTY)
        return cohort._replace(fate=fate.astype(jnp.int8))

    return fed._replace(cohorts=fed.cohorts.given(draw))


def dropping_by_state(fed):
    """A federation in which the client that drops out depends on the model."""

    def draw(state, hyper, key, layout=Layout()):
        cohort = fed.cohorts.draw(state, hyper, key, layout)
        total = sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(state.server.params))
        drops = cohort.is_drawn & (cohort.ids == jnp.int32(1000 * total) % NUM_CLIENTS)
        fate = jnp.where(drops, Fate.DROPPED, cohort.fate)
        return cohort._replace(fate=fate.astype(jnp.int8))

    return fed._replace(cohorts=fed.cohorts.given(draw, reads_state=True))


@telling
def test_cohorts_that_depend_on_the_state_are_not_drawn_ahead():
    case, ends = CASES["fedavg"], []
    model = make_model()
    for placement in ("device", "host"):
        execution = ExecutionConfig(clients_per_chunk=2, devices=None, placement=placement)
        everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
        fed = dropping_by_state(federation(case.make(model), case.data(), everyone))
        sim = compile_federation(fed, case.data(), execution)
        state, record, _ = sim.run(sim.init(KEY), KEY, 6)
        ends.append((theta_of(state.server.params), record.fate, record.clients))
    dropped = [set(r[f == Fate.DROPPED]) for f, r in zip(*ends[0][1:], strict=True)]
    assert len(set().union(*dropped)) > 1, "the model decides who drops out"
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)


FATES = np.array(
    [Fate.CONTRIBUTED, Fate.DROPPED, Fate.LATE, Fate.CONTRIBUTED, Fate.UNANNOUNCED, Fate.EMPTY]
)
CONTRIBUTES = FATES == Fate.CONTRIBUTED
GONE = (FATES != Fate.CONTRIBUTED) & (FATES != Fate.EMPTY)


@functools.cache
def shared_noise():
    """Distributed discrete noise whose shares are counted; clients count their rounds."""
    model = make_model()
    structure = jax.eval_shape(model.init, jax.random.key(0))
    plan = make_plan(4, 1.0, 1.0, num_clients=NUM_CLIENTS, bits=16)
    mean = discrete_mean(structure, plan, NUM_CLIENTS, varies=True)

    def combine(state, numbers, total, close):
        state, aggregate, info = mean.combine(state, numbers, total, close)
        return state, aggregate, info | {"sum": total[0], "shares": total[2]}

    base = fedavg(model, plain_trainer(model), aggregator=mean._replace(combine=combine))

    def client(message, own, client, hyper, key):
        return base.client(message, None, client, hyper, key)._replace(state=own + 1)

    counting = base._replace(client=client, client_state=ClientState(lambda server: jnp.int32(0)))
    joined = participants.participation(sampling.poisson(), NUM_CLIENTS, NUM_CLIENTS)
    fed = federation(counting, make_data(), joined)
    return fed, jax.device_put(examples_of(make_data()))


@functools.cache
def _one_round():
    fed, examples = shared_noise()

    @jax.jit
    def run(fate_of, examples):
        return with_fates(fed, fate_of).run_round(fed.init(KEY), fed.hyper, examples, KEY)

    return lambda fate_of, other=examples: run(np.asarray(fate_of, np.int32), other)


@telling
def test_clients_that_are_gone_add_neither_update_nor_noise():
    """Beside their absence only the record changes, whatever became of them."""
    gone = snapshot(_one_round()(FATES))
    absent = snapshot(_one_round()(np.where(GONE, Fate.EMPTY, FATES)))
    present = snapshot(_one_round()(np.where(GONE, Fate.CONTRIBUTED, FATES)))
    assert_same_state(gone[0], absent[0], atol=0)
    for a, b in zip(jax.tree.leaves(gone[2]), jax.tree.leaves(absent[2]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert gone[2].aggregator["shares"] == CONTRIBUTES.sum()
    assert present[2].aggregator["shares"] == (CONTRIBUTES | GONE).sum()
    assert np.any(present[2].aggregator["sum"] != gone[2].aggregator["sum"])
    np.testing.assert_array_equal(gone[0].clients, CONTRIBUTES.astype(np.int32))
    record = gone[1]
    order = np.argsort(record.clients)
    drawn = order[record.clients[order] >= 0]
    np.testing.assert_array_equal(record.clients[drawn], np.arange(NUM_CLIENTS - 1))
    np.testing.assert_array_equal(record.fate[drawn], FATES[:-1])
    assert record.num_drawn == NUM_CLIENTS - 1 and record.num_announced == NUM_CLIENTS - 2


@telling
def test_a_client_that_sends_what_is_not_finite_still_adds_its_share_of_noise():
    """The difference between having been there and not."""
    _, examples = shared_noise()
    data = make_data()
    x = data.examples["x"].copy()
    x[data.offsets[2] : data.offsets[3]] = np.nan
    spoiled = examples.replace(arrays={**data.examples, "x": x})
    there = np.full(NUM_CLIENTS, int(Fate.CONTRIBUTED))
    _, record, info = snapshot(_one_round()(there, spoiled))
    assert info.aggregator["shares"] == NUM_CLIENTS
    assert record.count(Fate.NOT_FINITE) == 1
    there[2] = Fate.DROPPED
    _, record, info = snapshot(_one_round()(there, spoiled))
    assert info.aggregator["shares"] == NUM_CLIENTS - 1
    assert record.count(Fate.NOT_FINITE) == 0 and record.count(Fate.DROPPED) == 1


@pytest.mark.parametrize("placement", later(["device", "host"], mark=telling))
def test_the_ledger_charges_all_drawn_clients(placement):
    """Compiled, chunked and streamed, a wrapped federation is a federation."""
    case = CASES["dp_sgd"]
    data = case.data()
    fed = federation(case.make(make_model()), data, case.participation())
    execution = PLAIN._replace(placement=placement, clients_per_chunk=2)
    sim = compile_federation(
        with_fates(fed, np.where(GONE, FATES, Fate.CONTRIBUTED)), data, execution
    )
    _, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
    assert record.count(Fate.DROPPED, Fate.LATE, Fate.UNANNOUNCED).sum() > 0
    for ids, fates in zip(record.clients, record.fate, strict=True):
        known = np.where(GONE, FATES, Fate.CONTRIBUTED)[ids]
        np.testing.assert_array_equal(fates, np.where(ids >= 0, known, Fate.EMPTY))
    accounts = PrivacyAccounting(sim)
    accounts.charge(record)
    drawn = np.array([np.sum(record.clients == i) for i in range(NUM_CLIENTS)])
    assert drawn[GONE].any()
    # A client without records pays for nothing, however often it is drawn.
    paid = accounts.ledgers["record"].num_compositions
    np.testing.assert_array_equal(paid[data.sizes > 0] > 0, drawn[data.sizes > 0] > 0)
    all_clients = PrivacyAccounting(sim)
    all_clients.charge(record._replace(fate=np.where(record.clients >= 0, Fate.CONTRIBUTED, 0)))
    delta = {"record": 1e-3}
    np.testing.assert_array_equal(
        accounts.epsilon(delta)["record"], all_clients.epsilon(delta)["record"]
    )


def built(name):
    case = CASES[name]
    known = population_of(case.data(), case.validation())
    fed = federation(case.make(make_model()), known, case.participation())
    return fed, snapshot(fed.init(KEY)), examples_of(case.data(), case.validation())


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("views", Views(shared=lambda server: server.params), "views.shared must be a SharedModel"),
        ("views", Views(personal=3), "views.personal must be a function"),
        ("client_state", lambda server: server, "client_state must be a ClientState or None"),
        ("stages", Stages(stage_of=0), "stages.stage_of must be a function"),
        ("numbers", {"alpha": 1.0}, "numbers must be a Numbers"),
        ("init", None, "init must be a function"),
    ],
)
def test_a_part_of_a_declaration_of_a_wrong_kind_is_refused_by_name(name, part, message):
    model = make_model()
    algorithm = fedavg(model, plain_trainer(model))._replace(**{name: part})
    joined = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    with pytest.raises(ValueError, match=rf"algorithm\.{message}.*, got "):
        federation(algorithm, make_data(), joined)


def test_views_of_a_shared_model():
    fed, state, _ = built("fedavg")
    assert fed.personal is None
    other = jax.tree.map(lambda x: x + 1, fed.shared(state))
    moved = fed.views.shared.write(state, other)
    np.testing.assert_array_equal(theta_of(fed.shared(moved)), theta_of(other))
    assert_same_state(moved._replace(server=state.server), state, atol=0)
    read = moved.server._replace(params=state.server.params)
    assert_same_state(moved._replace(server=read), state, atol=0)


@pytest.mark.parametrize("name", ["mr_mtl", "r_dpcfl", "local_only"])
def test_views_of_personal_models(name):
    fed, state, examples = built(name)
    kept = np.arange(NUM_CLIENTS) % 2

    def apart(tree):
        return jax.tree.map(lambda x: x + np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)), tree)

    if name == "r_dpcfl":
        server = state.server._replace(models=apart(state.server.models))
        state = state._replace(server=server, clients=kept.astype(np.int32))
        expected = theta_of(server.models)[kept]
    else:
        state = state._replace(clients=apart(state.clients))
        expected = theta_of(state.clients)
    assert (fed.shared is None) == (fed.views.shared is None) == (name != "mr_mtl")
    if name == "mr_mtl":
        np.testing.assert_array_equal(theta_of(fed.shared(state)), theta_of(state.server.mean))
    arrays = jax.tree.map(jnp.asarray, (state, examples))
    clients = jnp.arange(NUM_CLIENTS)
    of_all = jax.vmap(lambda i: fed.personal(arrays[0], arrays[1].client(i)))(clients)
    np.testing.assert_allclose(theta_of(of_all), expected, rtol=1e-6)
    assert len(np.unique(expected, axis=0)) > 1


class Wide(Layout):
    """A layout as on 32 devices, for who goes where; nothing runs on it."""

    num_devices = 32


MANY, WIDE = 400, Wide(has_spare_slots=True)


def balance(steps, device):
    load = np.bincount(device, steps, minlength=WIDE.num_devices)
    return load.mean() / load.max()


@functools.cache
def _many():
    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.lognormal(3, 1, MANY)).astype(np.int32)
    return sizes, participants.participation(sampling.poisson(), MANY, 300)


def _cohort_of(algorithm):
    sizes, joined = _many()
    chosen = algorithm._replace(
        training=algorithm.training._replace(num_steps=lambda size, config: size)
    )
    cohort = draw_cohort(chosen, joined, WIDE, jnp.asarray(sizes), chosen.hyper, 0, KEY)
    drawn = joined.draw(fold(KEY, Purpose.PARTICIPATION), 0)
    ids, is_there = np.asarray(cohort.ids), np.asarray(cohort.is_drawn)
    # Each is there once, and no other.
    expected = np.asarray(drawn.indices)[np.asarray(drawn.is_real)]
    np.testing.assert_array_equal(np.sort(ids[is_there]), np.sort(expected))
    per_device = len(ids) // WIDE.num_devices
    device = np.arange(len(ids)) // per_device
    # The first slots of every device are the ones in use.
    by_device = is_there.reshape(-1, per_device)
    assert np.all(by_device[:, :-1] >= by_device[:, 1:]) and 0 < is_there.sum() < MANY
    return ids[is_there], device[is_there]


def one_step_algorithm():
    model = make_model()
    return fedavg(model, local_trainer(model, LocalConfig(0.1, 4, 1)))


@telling
def test_work_is_shared_out_longest_first():
    sizes, joined = _many()
    steps = -np.sort(-sizes)
    room = WIDE.slots_per_device(joined)
    device, place = map(np.asarray, _shared_out(jnp.asarray(steps), WIDE.num_devices, room))
    assert len(set(zip(device, place, strict=True))) == MANY and place.max() < room
    strided = balance(steps, np.arange(MANY) % WIDE.num_devices)
    assert balance(steps, device) > 0.85 > strided
    ids, device = _cohort_of(one_step_algorithm())
    assert balance(sizes[ids], device) > 0.85


@telling
def test_every_client_runs_on_the_device_of_its_state():
    owned = one_step_algorithm()._replace(client_state=ClientState(lambda server: ()))
    ids, device = _cohort_of(owned)
    np.testing.assert_array_equal(device, ids // -(-MANY // WIDE.num_devices))


def _parts(key):
    """A key in numbers that add up exactly in float32."""
    bits = jax.random.key_data(key)
    return jnp.concatenate([bits >> 16, bits & 0xFFFF]).astype(jnp.float32)


@telling
def test_clients_encode_with_the_public_half_of_the_key():
    """An encoder sends the keys it is given; none of them is that of the server's noise."""

    def encode(state, numbers, contribution, sender):
        own = contribution["one_hot"][:, None] * _parts(sender.key)
        return {"public": _parts(sender.public_key), "own": own, "count": jnp.float32(1)}

    def contribute(state, numbers, update, sender):
        return {"one_hot": jax.nn.one_hot(sender.index, NUM_CLIENTS)}

    def combine(state, numbers, total, close):
        shown = {"sent": total["public"] / total["count"], "own": total["own"]}
        shown |= {"public": _parts(close.public_key), "private": _parts(close.private_key)}
        return state, jax.tree.map(jnp.zeros_like, make_model().init(KEY)), shown

    aggregator = Summed(stateless, contribute, combine, encode=encode)
    model = make_model()
    algorithm = fedavg(model, plain_trainer(model), aggregator=aggregator)
    joined = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    fed = federation(algorithm, make_data(), joined)
    examples = jax.device_put(examples_of(make_data()))
    state, shown = fed.init(KEY), []
    step = jax.jit(fed.run_round)
    for _ in range(2):
        state, _, info = step(state, fed.hyper, examples, KEY)
        shown.append(snapshot(info.aggregator))
    for r, found in enumerate(shown):
        np.testing.assert_array_equal(found["sent"], found["public"])
        np.testing.assert_array_equal(found["public"], _parts(fold(KEY, Purpose.PUBLIC, r)))
        np.testing.assert_array_equal(found["private"], _parts(fold(KEY, Purpose.CENTRAL_NOISE, r)))
    every_key = np.concatenate(
        [np.stack([f["public"], f["private"], *f["own"]]) for f in shown] + [_parts(KEY)[None]]
    )
    assert len(np.unique(every_key, axis=0)) == len(every_key)


@pytest.mark.parametrize("name", ["dp_fedavg", "dp_sgd"])
def test_where_privacy_is_claimed_no_function_of_the_host_receives_several_clients(name):
    model, case = make_model(), CASES[name]

    def loss_fn(outputs, batch):
        losses = model.loss_fn(outputs, batch)
        like = jax.ShapeDtypeStruct(losses.shape, losses.dtype)
        held = jax.lax.stop_gradient(losses)
        return losses + jax.pure_callback(np.sin, like, held, vmap_method="expand_dims")

    fed = federation(
        case.make(model._replace(loss_fn=loss_fn)), population_of(case.data()), case.participation()
    )
    with pytest.raises(ValueError, match="pure_callback must not be called with all of a batch"):
        _ = fed.facts.update
