"""What reads records under a claim for records is charged, or said, or refused: no third way."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit_cases import (
    EXECUTION,
    FULL,
    NUM_CLIENTS,
    NUM_ROUNDS,
    ON_MODELS,
    PUBLIC,
    data,
    mean,
    model,
    plain_trainer,
    private_trainer,
)
from marks import later, slow, telling

from fedjax_dp import algorithms
from fedjax_dp.algorithms import registry
from fedjax_dp.algorithms.base import Stages
from fedjax_dp.algorithms.blur_lus import SERVERS
from fedjax_dp.clients import (
    Exact,
    UpdateContext,
    exact_choice,
    mean_loss,
    private_choice,
    selection,
    transforms,
    update_transform,
)
from fedjax_dp.clients.base import LocalResult, TrainingMetrics
from fedjax_dp.core import trees
from fedjax_dp.core.messages import received
from fedjax_dp.data import participants
from fedjax_dp.engine import Examples, simulation
from fedjax_dp.engine.cohort import typed
from fedjax_dp.privacy.claims import RecordClaim
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent

KEY = jax.random.key(0)
CHOICE = {"selection_epsilon": 0.3, "loss_bound": 5.0}
JOINING = participants.participation(FULL, NUM_CLIENTS)


def built(algorithm):
    """Builds a simulation, which refuses what no claim covers."""
    return simulation(algorithm, data(), JOINING, EXECUTION)


def run(algorithm, rounds=1):
    sim = built(algorithm)
    return sim.run(sim.init(KEY), KEY, rounds)


def keeping(algorithm):
    """The algorithm's client, which keeps the state that it is handed."""

    def client(message, own, client, hyper, key):
        return algorithm.client(message, own, client, hyper, key)._replace(state=own)

    return client


def private():
    """DP-SGD, and the trainer that it has."""
    trainer = private_trainer(model())
    return algorithms.dp_sgd(model(), trainer), trainer


def stepping(algorithm, step, **options):
    """The algorithm with work on the host after the first round."""
    return algorithm._replace(stages=Stages(host_steps=(algorithms.HostStep(1, step, **options),)))


# An algorithm's own functions.


def peeking(algorithm, trainer, look):
    """The algorithm whose clients scale their update by what they look up, trained by `trainer`."""

    def client(message, own, client, hyper, key):
        result = trainer.train(message, client, hyper.local, key)
        update = trees.scale(result.delta, look(message, client, key))
        return algorithms.ClientOutput(update, result.weight, own, result.metrics)

    return algorithm._replace(client=client)


def first_input(params, client, key):
    return client.gather(jnp.arange(1))["x"][0, 0]


def stored_input(params, client, key):
    return client.examples["x"][0, 0]


def loss_there(params, client, key):
    return mean_loss(model(), params, client)


def chosen(choice):
    def look(params, client, key):
        models = jax.tree.map(lambda p: jnp.stack([p, p + 1]), params)
        return choice.of(key, models, client, jnp.ones(2, bool), CHOICE).astype(jnp.float32)

    return look


@telling
@pytest.mark.parametrize(
    "look", later([first_input, stored_input, loss_there], but=[first_input], mark=telling)
)
def test_an_algorithm_that_claims_for_records_is_handed_none(look):
    algorithm, trainer = private()
    with pytest.raises(ValueError, match="client must be used for its public data"):
        run(peeking(algorithm, trainer, look))
    weighed = algorithms.dp_sgd(
        model(), trainer, weight_of=lambda client, config: jnp.abs(look(None, client, None))
    )
    if look is not loss_there:
        with pytest.raises(ValueError, match="client must be used for its public data"):
            run(weighed)
    plain, admitted = plain_trainer(model()), run if look is first_input else built
    admitted(peeking(algorithms.fedavg(model(), plain), plain, look))
    admitted(peeking(algorithms.fedavg(model(), plain, aggregator=mean()), plain, look))


@telling
def test_whole_clients_protected_do_not_cover_their_records():
    """Under both claims the one for records still forbids what the one for clients covers."""
    trainer = private_trainer(model())
    both = algorithms.fedavg(model(), trainer, aggregator=mean())
    with pytest.raises(ValueError, match="client must be used for its public data"):
        run(peeking(both, trainer, first_input))
    run(peeking(both, trainer, lambda params, client, key: client.size.astype(jnp.float32)))


def test_what_a_transform_closes_over_inside_a_round_is_refused_too():
    algorithm, trainer = private()

    def client(message, own, client, hyper, key):
        @update_transform(reads_records=False)
        def closing(delta, context):
            return trees.scale(delta, first_input(None, client, None))

        result = trainer.train(message, client, hyper.local, key, update_transform=closing)
        return algorithms.ClientOutput(result.delta, result.weight, own, result.metrics)

    with pytest.raises(ValueError, match="client must be used for its public data"):
        run(algorithm._replace(client=client))


@pytest.mark.parametrize("computed", [lambda x: 1 + x, lambda x: jnp.ones(2) * x, jnp.exp])
def test_exact_metrics_are_not_computed_with(computed):
    with pytest.raises(ValueError, match="metrics of local training must leave as metrics alone"):
        computed(Exact(jnp.float32(1)))


@telling
def test_exact_metrics_stay_metrics():
    algorithm, _ = private()

    def sending(part, of):
        def client(message, own, client, hyper, key):
            output = algorithm.client(message, own, client, hyper, key)
            return output._replace(**{part: of(output.training.loss_sum)})

        return algorithm._replace(client=client)

    for part in ("update", "weight", "state"):
        with pytest.raises(
            ValueError, match="metrics of local training must not flow into updates"
        ):
            run(sending(part, lambda loss: loss))
    with pytest.raises(ValueError, match="metrics of local training must leave as metrics alone"):
        run(sending("weight", lambda loss: 1.0 + loss))
    for part in ("update", "weight", "state"):
        for opened in (lambda loss: loss.value, lambda loss: jnp.exp(-jax.tree.leaves(loss)[0])):
            with pytest.raises(
                ValueError, match="metrics of local training must not flow into updates"
            ):
                run(sending(part, opened))
    _, _, info = run(sending("info", lambda loss: {"loss": loss, "own": jnp.float32(2)}))
    assert info.clients["own"] == 2.0 and info.clients["loss"] > 0
    _, _, info = run(algorithm)
    assert np.isfinite(info.training.train_loss) and info.training.train_loss > 0


def test_training_without_an_event_is_refused_under_a_claim():
    algorithm = algorithms.dp_sgd(model(), private_trainer(model()))
    message = r"local training, which reads records, must have an event in dp_sgd.*got None"
    with pytest.raises(ValueError, match=message):
        run(peeking(algorithm, plain_trainer(model()), lambda *_: 1.0))


@telling
def test_a_choice_is_charged_or_refused():
    algorithm, trainer = private()
    choice = private_choice(model())
    choosing = peeking(algorithm, trainer, chosen(choice))
    message = r"a private choice, which reads records, must be charged by dp_sgd.*BoundedRange"
    with pytest.raises(ValueError, match=message):
        run(choosing)
    charged = selection.trained_and_chosen(algorithm.training.record.at(0), choice)
    priced = choosing._replace(training=choosing.training._replace(record=RecordClaim((charged,))))
    run(priced.with_numbers(CHOICE, selection.RANGES))
    exact = peeking(algorithm, trainer, chosen(exact_choice(model())))
    with pytest.raises(ValueError, match="a choice by exact loss, which reads records, must have"):
        run(exact)
    said = exact.training.record._replace(not_covered="which model was chosen")
    run(exact._replace(training=exact.training._replace(record=said)))


def test_nothing_of_a_refused_round_is_released():
    """The refusal comes when the simulation is built, before there is any state."""
    algorithm, trainer = private()
    peeks = peeking(algorithm, trainer, first_input)
    with pytest.raises(ValueError, match="client must be used"):
        simulation(peeks, data(), JOINING, EXECUTION)
    automatic = EXECUTION._replace(clients_per_chunk="auto")
    with pytest.raises(ValueError, match="client must be used"):
        simulation(peeks, data(), JOINING, automatic)


@telling
def test_work_on_the_host_reads_no_client_state_under_its_privacy():
    algorithm = algorithms.fedavg(model(), plain_trainer(model()), aggregator=mean())
    algorithm = algorithm._replace(
        client_state=algorithms.ClientState(lambda server: jnp.float32(0)),
        client=keeping(algorithm),
    )
    seen = []

    def step(server, clients, hyper, key):
        seen.append(clients)
        return server

    rule = r"host_steps\.reads_clients must be false under privacy of"
    with pytest.raises(ValueError, match=rule):
        run(stepping(algorithm, step))
    run(stepping(algorithm, step, reads_clients=False))
    assert seen == [None]
    record = algorithms.local_only(model(), private_trainer(model()))
    state, _, _ = run(stepping(record, step))
    np.testing.assert_array_equal(seen[1].of_all(lambda row: row)["w"], state.clients["w"])


# Every algorithm, every unit, every option that may decide over what is read.

VALUES = {
    "score": {
        "blur_lus": transforms.SCORES,
        "r_dpcfl": selection.SCORES,
        "f_cdpfl": selection.SCORES,
        "jump_start": ("own", "all"),
    },
    "sparsity": (0.0, 0.6),
    "selection": ("private", "exact"),
    "server": tuple(SERVERS),
    "features": ("centred", "authors"),
    "split": ("mixture", "top_tenth"),
    "reestimate": ("first",),
    "reads_tail": (False,),
    "separation": ("adjusted",),
    # The last of four rounds is a choice alone; the others are what they are without it.
    "ends_with_choice": (True,),
    "assignment": ("end",),
    "mode": ("inexact",),
    "extension": ("smooth",),
    "client_map": ("prox", "gradient"),
    "solver": ("local",),
    "form": ("decentralised", "centralised"),
    **dict.fromkeys(("is_averaged", "is_masked_mean", "looks_ahead", "inherits_mask"), (True,)),
    "is_inside_root": (False,),
    **dict.fromkeys(("is_weighted", "is_standardized"), (False, True)),
    **dict.fromkeys(("is_pull_clipped", "is_identical_start"), (False, True)),
    "home": ("batch_norm",),
    "order": ("sequential",),
    "scope": ("tensor",),
    "rewinds": (False,),
    "prunes": ("after", "before"),
    "distance": ("norm",),
    "control": ("steps", "gradient"),
    "growth": ("disjoint", "cumulative"),
    "mechanism": ("laplace",),
    "calibration": ("corrected",),
    "personal": ("own",),
}
# What decides over nothing that is read, or has to be given.
FIXED = {
    "blur_lus": {"radius": 0.5},
    "ifca": {"num_models": 2},
    "r_dpcfl": {"num_models": 2, "selection_epsilon": 40.0, "num_selections": 1},
    "rc_dpfl": {"num_models": 2, "soft_share": 0.0},
    "f_cdpfl": {"num_models": 2, "selection_epsilon": 40.0, "num_selections": 2},
    "km_cdpfl": {"num_models": 2},
    "o_dpcfl": {"clusters": (0, 1, 0, 1)},
    "fedper": {"head": "b"},
    "fedrep": {"head": "b"},
    **{name: {"prunable": "w"} for name in ("lottery_fl", "fed_ltn", "jump_start")},
}


def compositions():
    """`(name, unit, options)`: all that the registry can be asked for."""
    found = []
    for name, entry in registry.ALGORITHMS.items():
        fixed = FIXED.get(name, {})
        swept = [option for option in registry.options_of(name) if option in VALUES]
        values = [VALUES[option] for option in swept]
        values = [v[name] if isinstance(v, dict) else v for v in values]
        # Whose noise is on whole models: test_minimizer_noise searches what a record moves there.
        units = ("none",) if name in ON_MODELS else entry.units
        for unit, chosen_values in itertools.product(units, itertools.product(*values)):
            options = {**fixed, **dict(zip(swept, chosen_values, strict=True))}
            if unit in ("none", "record") or _fits_a_private_mean(entry, name, options):
                found.append((name, unit, options))
    return found


def _fits_a_private_mean(entry, name, options):
    """Whether clients can be protected under options, of which weights are left to another test."""
    needs = entry.needs(registry.options_of(name) | options)
    try:
        needs.check_clients()
        needs.check_weights(True)
    except ValueError:
        return False
    return True


def test_every_option_that_is_a_name_or_a_switch_is_swept():
    for name in registry.ALGORITHMS:
        for option, default in registry.options_of(name).items():
            if isinstance(default, str | bool):
                assert option in VALUES, f"{name}.{option}"
                if isinstance(VALUES[option], dict):
                    assert name in VALUES[option]


def build(name, unit, options, trainer):
    with_clients = unit in ("client", "both")
    problem = registry.Problem(
        num_clients=NUM_CLIENTS,
        num_rounds=NUM_ROUNDS,
        aggregator=mean() if with_clients else None,
        declared_epsilon=np.array([1.0, 2.0, 6.0, 5.0]),
        public_x=PUBLIC,
    )
    return registry.build(name, model(), trainer, problem, unit=unit, options=options)


def releasing_the_same(trainer):
    """A trainer whose release ignores the records that it hands to its transforms."""

    def train(start, client, config, key, *, update_transform=None, **others):
        delta = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), start)
        params = trees.add(start, delta)
        if update_transform is not None:
            gradient = jax.tree.map(jnp.sin, delta)
            context = UpdateContext(params, gradient, client, config, key)
            delta = update_transform.apply(delta, context)
        total = jnp.sum(client.examples["x"])
        metrics = TrainingMetrics(total, jnp.int32(8), total, jnp.int32(8), jnp.int32(0), total)
        return LocalResult(delta, params, client.size.astype(jnp.float32), jnp.int32(1), metrics)

    return trainer._replace(train=train, reading_whole=lambda batches: releasing_the_same(trainer))


def clients_with_other_records(count=12):
    """The same client with other records; what it sends is compared."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, 8, PUBLIC.shape[1])).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(rng.integers(0, 2, (count, 8)), jnp.float32)}


def with_other_models(server):
    """Makes the models of clusters differ, so that a choice has something to say."""
    if not hasattr(server, "models"):
        return server
    leaves, structure = jax.tree.flatten(server.models)
    keys = jax.random.split(KEY, len(leaves))
    drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return server._replace(models=jax.tree.unflatten(structure, drawn))


def rounds_that_tell(algorithm):
    """By stage, whether anything that a client sends or keeps follows its records."""
    server = with_other_models(algorithm.init(KEY))
    own = None if algorithm.client_state is None else algorithm.client_state.init(server)
    hyper = typed(algorithm.hyper).of_client(0)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def sent(arrays, stage):
        places = jnp.zeros(1, jnp.int32), jnp.full(1, 8, jnp.int32)
        # Of other records too, so that an algorithm that reads them shows it.
        held = Examples(arrays, *places, Examples(arrays, *places, limit=8), limit=8)
        client = held.client(0, stage)
        message = received(algorithm.message_to(server, own, client))
        output = algorithm.client(message, own, client, hyper, KEY)
        return output.update, output.weight, output.state

    telling = {}
    for index in range(NUM_ROUNDS):
        stage = int(algorithm.stages.stage_of(server, algorithm.hyper, index))
        each = sent(clients_with_other_records(), jnp.int32(stage))
        differs = any(np.any(np.asarray(x) != np.asarray(x)[:1]) for x in jax.tree.leaves(each))
        telling[stage] = telling.get(stage, False) or differs
    return telling


def choices_in(event):
    """The private choices within an event, by type and ε."""
    if isinstance(event, BoundedRangeDpEvent):
        return [event.epsilon]
    inner = [event.event] if hasattr(event, "event") else getattr(event, "events", [])
    return [found for part in inner for found in choices_in(part)]


def verdict(name, unit, options):
    """What becomes of a composition: refused, charged, said, or nothing is read."""
    is_private = unit in ("record", "both")
    trainer = private_trainer(model()) if is_private else plain_trainer(model())
    try:
        algorithm = build(name, unit, options, releasing_the_same(trainer))
    except ValueError as error:
        words = (
            "read no records, since the event",
            "gradients of all records, which no noise covers",
        )
        assert any(text in str(error) for text in words)
        return "refused"
    telling = rounds_that_tell(algorithm)
    claim = algorithm.claims.record
    assert (claim is not None) == is_private
    if not is_private:
        return "free" if any(telling.values()) else "silent"
    hyper = jax.tree.map(np.asarray, algorithm.hyper)
    if claim.not_covered is not None:
        assert any(telling.values())
        return "said"
    for stage, tells in telling.items():
        price = claim.at(stage)(8, hyper)
        held = choices_in(price)
        assert bool(held) == tells, f"stage {stage}: sends what it does not charge"
        assert held in ([], [options.get("selection_epsilon")])
        trained = trainer.private_claim().at(0)(8, hyper.local)
        # Neither a first whole batch nor a last choice alone is charged as an ordinary round.
        is_first, is_last = stage == 0 and name == "r_dpcfl", stage == max(telling)
        if not is_first and not (is_last and options.get("ends_with_choice")):
            assert str(trained) in str(price)
    return "charged" if any(telling.values()) else "silent"


def expected(name, unit, options):
    """By hand: what each composition is known to read."""
    is_private = unit in ("record", "both")
    if name == "blur_lus" and options["score"] == "cost" and options["sparsity"] > 0:
        return "refused" if is_private else "free"
    if options.get("control") == "gradient":
        return "refused" if is_private else "free"
    if name in ("ifca", "lottery_fl", "fed_ltn", "jump_start"):
        return "free"
    if name == "rc_dpfl" or options.get("selection") == "exact":
        return "said"
    return "charged" if name in ("r_dpcfl", "f_cdpfl") else "silent"


# Options that decide over what is read, and never over whether it is charged, are all swept, but
# these sooner; and quickly, one composition for each way to be charged, said or refused.
DECISIVE = {"score", "sparsity", "selection", "ends_with_choice", "assignment"}
QUICK = {
    "ifca-none-True",
    "dp_sgd-record",
    "blur_lus-record-0.6-cost-fedavg",
    "blur_lus-record-0.6-magnitude-fedavg",
    "r_dpcfl-record-adjusted-private-accuracy-centred-True-False",
    "r_dpcfl-record-adjusted-exact-loss-centred-True-False",
}


def cases():
    found = []
    for name, unit, options in compositions():
        known = registry.options_of(name)
        usual = all(options[o] == known[o] for o in options if o in VALUES and o not in DECISIVE)
        swept = [str(v) for option, v in options.items() if option in VALUES]
        label = "-".join([name, unit, *swept])
        # Clients that are protected too send the same: one of both units is soon enough.
        units = registry.ALGORITHMS[name].units
        claims = unit == ("record" if "record" in units else "both")
        marks = () if label in QUICK else telling if usual and claims else slow
        found.append(pytest.param((name, unit, options), id=label, marks=marks))
    assert {case.id for case in found} >= QUICK
    return found


@pytest.mark.parametrize("case", cases())
def test_what_reads_records_is_charged_or_said_or_refused(case):
    assert verdict(*case) == expected(*case)


def test_the_walk_finds_what_is_sent_and_not_charged():
    """The check itself: a metric or a look that is sent shows, though the claim is silent on it."""
    trainer = releasing_the_same(private_trainer(model()))
    algorithm = algorithms.dp_sgd(model(), trainer)
    assert not any(rounds_that_tell(algorithm).values())

    def sending_a_metric(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        return output._replace(weight=output.training.loss_sum)

    assert rounds_that_tell(algorithm._replace(client=sending_a_metric))[0]
    assert rounds_that_tell(peeking(algorithm, trainer, first_input))[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases() if c.values[0][1] in ("record", "both")])
def test_every_composition_that_is_not_refused_runs_with_its_records_sealed(case):
    """The engine admits what the walk found covered: every reader's event is in the claim."""
    name, unit, options = case
    if expected(*case) == "refused":
        pytest.skip("refused where it is built")
    algorithm = build(name, unit, options, private_trainer(model()))
    store, joining = data(), JOINING
    if name == "centralized":
        store, joining = algorithms.pool(store), participants.participation(FULL, 1)
    sim = simulation(algorithm, store, joining, EXECUTION)
    sim.compile(sim.init(KEY), KEY)
