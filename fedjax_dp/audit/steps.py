"""Grey-box checks of a private step, choice or message, with the same noise on neighbours."""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from scipy import stats

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Hyper
from fedjax_dp.audit.canaries import MARK, Planted
from fedjax_dp.audit.floats import check_records, extreme_records, extreme_updates, hostile_updates
from fedjax_dp.audit.noise import (
    ROUNDING,
    StepCheck,
    distance,
    mean_release,
    measure_noise,
    stated_multiplier,
)
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.gradients import GradientRule
from fedjax_dp.clients.selection import Choice
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.messages import received
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, flat, nested
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.facts import FederationFacts, examples_of, population_of
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.engine.sides import run_client
from fedjax_dp.privacy.events import flatten
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent
from fedjax_dp.server.base import Close, Fate, Roster, Sender, Stacked
from fedjax_dp.server.masking import noised_parts

_COHORT = 4
# The number of updates and records of hostile floats in a check.
_UPDATES, _RECORDS = 60, 200
_ROUND = "round with and without a client"
# Confidence of each limit on a frequency; there are some hundreds of them.
_CONFIDENCE = 1 - 1e-6


@checked
def check_gradient_rule(
    rule: GradientRule,
    params: PyTree,
    batch: Mapping[str, Any],
    config: LocalConfig,
    key: PRNGKey,
    *,
    num_draws: int = 256,
) -> list[StepCheck]:
    """Compares sums and releases of a gradient rule on batches that differ in one record.

    The first record of the batch is present or not, or is exchanged for another, or is in the
    padding; it is the record itself, and then every record that `extreme_records` lists.

    Args:
      rule: a rule that claims privacy.
      params: the parameters at which gradients are taken.
      batch: named arrays `[examples, ...]`, or trees of dicts of them, at least two examples.
      config: the numbers of one client, scalars.
      key: root of all draws.
      num_draws: releases from which the noise is measured, at least 2.

    Returns:
      The checks.

    Raises:
      ValueError: if the rule claims nothing, or the batch is too small.
    """
    if rule.bound is None or rule.event is None:
        raise ValueError("rule must state a bound and an event, got one that claims no privacy")
    batch = {name: np.asarray(array) for name, array in flat(batch).items()}
    size = len(next(iter(batch.values())))
    checks.require(size >= 2, "batch", "hold at least two examples", size)
    contribution, event = float(rule.bound(config).contribution), rule.event(config)
    all_real, others = np.ones(size, bool), np.arange(size) > 0

    @jax.jit
    def total(batch, is_real):
        return rule.micro_batch(params, nested(batch), is_real, key, config).gradient

    @jax.jit
    def release(summed, count, key):
        return rule.release(summed, count, config, key)

    without = total(batch, others)
    zeros = trees.zeros_like(without)
    before = farthest = total(batch, all_real)
    alone = present = exchanged = padded = 0.0
    first = {name: array[0] for name, array in batch.items()}
    for record in extreme_records(first, np.random.default_rng(0)):
        changed = {name: np.stack([record[name], *array[1:]]) for name, array in batch.items()}
        summed = total(changed, all_real)
        moved = distance(summed, without)
        if math.isfinite(moved) and moved > present:
            farthest = summed
        alone = max(alone, distance(total(changed, ~others), zeros))
        present = max(present, moved)
        exchanged = max(exchanged, distance(summed, before))
        padded = max(padded, distance(total(changed, others), without))
        before = summed
    bound = contribution * (1 + ROUNDING)
    results: list[StepCheck | None] = [
        StepCheck("gradient of a record alone", alone, bound),
        StepCheck("sum with and without a record", present, bound),
        StepCheck("sum with a record exchanged", exchanged, 2 * bound),
        StepCheck("sum with a record in the padding", padded, 0.0),
        check_records(rule, params, batch, config, key, num_records=_RECORDS),
    ]
    noise = measure_noise(release, (farthest, size), key, num_draws=num_draws)
    released = release(farthest, size, key)
    neighbour = release(without, size - 1, key)
    results.append(noise.compare("step with and without a record", released, neighbour, event))
    multiplier = stated_multiplier(event)
    if multiplier:
        # The sum is moved by a known length to learn how far a release moves with it.
        step = contribution / math.sqrt(trees.num_parameters(zeros))
        moved_sum = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), farthest)
        gain = distance(release(moved_sum, size, key), released) / distance(moved_sum, farthest)
        results.append(noise.against("noise of a step", multiplier * contribution * gain))
    return [check for check in results if check is not None]


@checked
def check_cohort(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    state: SimulationState,
    key: PRNGKey,
    *,
    num_draws: int = 256,
) -> list[StepCheck]:
    """Compares the engine's round on cohorts that differ in one client.

    A few clients take part, or all if clients share the noise; the last of them sends the updates
    and weights that `extreme_updates` lists, or NaN, which contributes zero, while the others send
    ones. All that a round releases is compared: the aggregate and the aggregator's next state.

    Args:
      algorithm: an algorithm that claims privacy for clients, with the numbers to be checked.
      data: a population of at least two clients.
      state: a state of the algorithm on this population.
      key: root of all draws.
      num_draws: rounds from which the noise is measured, at least 2.

    Returns:
      The checks.

    Raises:
      ValueError: if the algorithm claims nothing for clients, or the population is too small.
    """
    aggregator, claim = algorithm.aggregator, algorithm.claims.client
    if claim is None:
        raise ValueError("algorithm must claim privacy for clients, got one that does not")
    numbers = algorithm.hyper.aggregator
    checks.require(data.num_clients >= 2, "data", "hold at least two clients", data.num_clients)
    event, sensitivity = claim.event(numbers), claim.sensitivity(state.aggregator, numbers)
    bound = float(np.asarray(sensitivity.contribution)) * (1 + ROUNDING)
    structure = FederationFacts(algorithm, population_of(data)).update
    ordinary = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), structure)
    num_clients = data.num_clients if claim.min_participants > 0 else _COHORT
    count = min(data.num_clients, num_clients)
    cohort, is_last = round_of(algorithm, count), jnp.arange(count) == count - 1

    @jax.jit
    def run(state, update, weight, is_there, key):
        updates = jax.tree.map(lambda o, u: jnp.stack([o] * (count - 1) + [u]), ordinary, update)
        weights = jnp.where(is_last, weight, 1.0)
        return cohort(state, updates, weights, ~is_last | is_there, key)

    def release(*arguments):
        return run(*arguments)[0]

    @jax.jit
    def contribution_of(update, weight):
        sender, _ = _one_client(weight, key, key)
        broadcast = aggregator.broadcast(state.aggregator)
        return aggregator.contribute(broadcast, numbers, update, sender)

    not_finite = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan).astype(s.dtype), structure)
    reaches = _reaching_leaves(algorithm, state, contribution_of(ordinary, 1.0), key)
    without = release(state, not_finite, 1.0, True, key)
    noise = measure_noise(release, (state, ordinary, 1.0, True), key, num_draws=num_draws)
    quiet = measure_noise(release, (state, not_finite, 1.0, True), key, num_draws=num_draws)
    rounds = []

    def length_of(update: PyTree, weight: float) -> float:
        """Measures what reaches the noise; updates that are not finite contribute zero."""
        part = contribution_of(update, weight)
        if not trees.is_finite((update, jnp.float32(weight), part)):
            return 0.0
        kept = [x for x, r in zip(jax.tree.leaves(part), reaches or (), strict=True) if r]
        return distance(kept, trees.zeros_like(kept))

    for update, weight in extreme_updates(structure):
        released = release(state, update, weight, True, key)
        check = noise.compare(_ROUND, released, without, event)
        if check is not None:
            rounds.append((check.measured, (state, update, weight, True)))
    results = []
    if reaches is not None:
        hostile = hostile_updates(structure, _UPDATES, np.random.default_rng(0))
        largest = max(length_of(*one) for one in chain(extreme_updates(structure), hostile))
        results.append(StepCheck("contribution of a client", largest, bound))
    if rounds:
        _, farthest = max(rounds, key=lambda pair: pair[0])
        no_update = (state, not_finite, 1.0, True)
        released = mean_release(release, farthest, key, num_draws=num_draws)
        neighbour = mean_release(release, no_update, key, num_draws=num_draws)
        check = noise.compare(_ROUND, released, neighbour, event)
        assert check is not None
        results.append(check)
    stddev = run(state, ordinary, 1.0, True, key)[1].get("noise_stddev")
    if stddev is not None:
        # Rounding adds to discrete noise; the first of tied rounds carries more than later ones.
        may_exceed = aggregator.encode is not None or claim.min_separation > 1
        # Noise is added to floats only; a seed may be released besides.
        leaves = [
            i
            for i, x in enumerate(jax.tree.leaves(without[0]))
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        results.append(
            noise.against("noise of a round", float(stddev), leaves, may_exceed=may_exceed)
        )
    results.append(noise.same_as("noise with and without a client", quiet))
    # Clients that add noise themselves do not add the noise of their substitutes.
    if not _adds_noise(algorithm, state, contribution_of(ordinary, 1.0), key):
        empty_slot = release(state, ordinary, 1.0, False, key)
        gap = distance(empty_slot, without)
        results.append(StepCheck("round with an empty slot and with NaN", gap, 0.0))
    return results


def round_of(algorithm: FederatedAlgorithm, num_clients: int) -> Any:
    """Builds a round of clients whose updates are given.

    It is `(state, updates [clients, ...], weights [clients], is_there [clients], key) ->
    ((aggregate, state of the aggregator), info)`.
    """
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    examples = Examples({}, jnp.zeros_like(ids), jnp.ones_like(ids))

    def show(server, aggregate, hyper, round, key):
        return server, {"aggregate": noised_parts(aggregate)}

    def run(state, updates, weights, is_there, key):
        def client(message, own, client, hyper, key):
            own_update = jax.tree.map(lambda x: x[client.index], updates)
            return ClientOutput(own_update, weights[client.index], None)

        # These clients read no records and have no state.
        declared = algorithm._replace(
            broadcast=lambda server, client: (),
            client=client,
            server_step=show,
            client_state=None,
            training=algorithm.training._replace(record=None),
        )
        fate = jnp.where(is_there, Fate.CONTRIBUTED, Fate.EMPTY).astype(jnp.int8)
        after, _, info = run_round(
            declared,
            Layout(),
            state._replace(clients=None),
            algorithm.hyper,
            examples,
            Cohort(ids, fate, jnp.int32(0)),
            key,
        )
        return (info.server["aggregate"], after.aggregator), info.aggregator

    return run


def _one_client(weight: Any, own_key: PRNGKey, round_key: PRNGKey) -> tuple[Sender, Close]:
    """Makes sender and close of a round with client 0 alone."""
    roster = Roster.of_one()
    fates = jnp.full(1, Fate.CONTRIBUTED, jnp.int8)
    sender = Sender(jnp.int32(0), weight, own_key, round_key, roster)
    return sender, Close(roster, fates, round_key, round_key)


def _adds_noise(
    algorithm: FederatedAlgorithm, state: SimulationState, contribution: PyTree, key: PRNGKey
) -> bool:
    """Checks whether a client adds noise itself: what it sends for zeros depends on its key."""
    encode, numbers = algorithm.aggregator.encode, algorithm.hyper.aggregator
    if encode is None:
        return False

    @jax.jit
    def message(own_key):
        sender, _ = _one_client(jnp.float32(1), fold(own_key, Purpose.ENCODING, 0), key)
        return encode(state.aggregator, numbers, trees.zeros_like(contribution), sender)

    one, other = (jax.tree.leaves(message(k)) for k in jax.random.split(key))
    return not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _reaching_leaves(
    algorithm: FederatedAlgorithm, state: SimulationState, contribution: PyTree, key: PRNGKey
) -> list[bool] | None:
    """Finds which leaves of a summed contribution move the aggregate; None if summed otherwise."""
    aggregator, numbers = algorithm.aggregator, algorithm.hyper.aggregator
    leaves, structure = jax.tree.flatten(contribution)
    if isinstance(aggregator, Stacked) or aggregator.encode is not None:
        return None

    @jax.jit
    def aggregate(leaves):
        total = jax.tree.unflatten(structure, leaves)
        _, close = _one_client(jnp.float32(1), key, key)
        return aggregator.combine(state.aggregator, numbers, total, close)[1]

    base = aggregate(leaves)
    return [
        distance(aggregate([x + 1 if i == j else x for j, x in enumerate(leaves)]), base) > 0
        for i in range(len(leaves))
    ]


@checked
def check_choice(
    choice: Choice | None,
    numbers: Mapping[str, Any],
    models: PyTree,
    batch: Mapping[str, Any],
    key: PRNGKey,
    *,
    num_draws: int = 20_000,
) -> list[StepCheck]:
    """Compares how often each model is chosen, with one record exchanged or left out.

    A few records are the sharpest test, since each moves the score of a model most. The first is
    exchanged for everything that `extreme_records` lists; the last is left out.

    Args:
      choice: the choice, such as `FederatedAlgorithm.choice`, or None.
      numbers: its numbers, such as `Hyper.algorithm`.
      models: parameters of the offered models, `[models, ...]`, all different.
      batch: the client's records, named arrays `[examples, ...]`, or trees of dicts of them, at
        least two.
      key: root of all draws.
      num_draws: choices on each client, at least 1,000.

    Returns:
      One check, of the largest proven log-ratio against ε. Empty without a choice, and for one
      that claims nothing.

    Raises:
      ValueError: if the batch or the number of draws is too small.
    """
    if choice is None or choice.event is None:
        return []
    batch = {name: np.asarray(array) for name, array in flat(batch).items()}
    size = len(next(iter(batch.values())))
    checks.require(size >= 2, "batch", "hold at least two examples", size)
    checks.whole("num_draws", num_draws, at_least=1000)
    event, choose = choice.event(numbers), choice.of
    assert isinstance(event, BoundedRangeDpEvent)
    count = jax.tree.leaves(models)[0].shape[0]

    @jax.jit
    def frequencies(examples, size, key):
        held = Examples(
            nested(examples),
            jnp.zeros(1, jnp.int32),
            size[None],
            limit=len(next(iter(batch.values()))),
        )
        client = held.client(0)

        def one(key):
            return choose(key, models, client, jnp.ones(count, bool), numbers)

        drawn = jax.lax.map(one, jax.random.split(key, num_draws), batch_size=1000)
        return jnp.zeros(count, jnp.int32).at[drawn].add(1)

    clients = [(batch, size), (batch, size - 1)]
    first = {name: array[0] for name, array in batch.items()}
    for record in extreme_records(first, np.random.default_rng(0)):
        changed = {name: np.stack([record[name], *a[1:]]) for name, a in batch.items()}
        clients.append((changed, size))
    tables = [
        np.asarray(frequencies(examples, jnp.int32(n), jax.random.fold_in(key, i)))
        for i, (examples, n) in enumerate(clients)
    ]
    proven = max(
        _proven_ratio(one, other, num_draws)
        for table in tables[1:]
        for one, other in ((tables[0], table), (table, tables[0]))
    )
    return [StepCheck("choice with a record exchanged or left out", proven, event.epsilon)]


def _proven_ratio(one: np.ndarray, other: np.ndarray, num_draws: int) -> float:
    """Bounds the largest log-ratio of two discrete distributions from below."""
    tail = 1 - _CONFIDENCE
    least = stats.beta.ppf(tail, np.maximum(one, 1), num_draws - one + 1)
    most = stats.beta.ppf(_CONFIDENCE, other + 1, np.maximum(num_draws - other, 1))
    ratios = np.log(np.where(one > 0, least, 1e-300) / np.where(other < num_draws, most, 1.0))
    return max(float(np.max(ratios)), 0.0)


@checked
def check_client(
    planted: Planted, state: SimulationState, key: PRNGKey, *, num_draws: int = 256
) -> list[StepCheck]:
    """Compares everything that a client sends, with and without a canary among its records.

    In every stage in which a client only trains, it takes one local step on all of its records.
    Each part of what it sends (or its own model, where it sends nothing) must carry noise that
    hides the canary's share, or must not depend on the canary at all; its weight must not. Parts
    are compared one by one, since one may be a function of another, like a control variate of an
    update. Votes have no distance to compare with noise: `plant_votes` attacks them.

    Args:
      planted: canary records in an algorithm whose local optimiser is plain SGD; others change the
        ratio of differences to noise.
      state: a state of the planted algorithm.
      key: root of all draws.
      num_draws: steps from which the noise is measured, at least 2.

    Returns:
      The checks; empty where no event consists of equal releases with noise of a known kind.

    Raises:
      ValueError: if the canaries are not records.
    """
    checks.require(planted.unit == "record", "planted", "hold canary records", planted.unit)
    algorithm, record = planted.algorithm, planted.algorithm.claims.record
    assert record is not None
    owner = int(planted.owners[0])
    size = int(planted.data.sizes[owner])
    numbers = jax.tree.map(np.asarray, algorithm.hyper.of_client(owner))
    local = numbers.local._replace(num_steps=np.int32(1), batch_size=np.float32(size))
    hyper = numbers._replace(local=local)
    send, results = _sender(planted, hyper, owner), []
    for stage, event_of in enumerate(record.events):
        parts = flatten(event_of(size, hyper))
        # A stage in which the client chooses too releases more than steps: see `check_choice`. Two
        # trainings of a step each are two like releases, and what is sent carries the noise of one.
        kinds = {repr(event) for event, _ in parts}
        if len(kinds) == 1 and stated_multiplier(parts[0][0]):
            noise = measure_noise(send, (state, True, stage), key, num_draws=num_draws)
            sent = send(state, True, stage, key), send(state, False, stage, key)
            results += noise.compare_parts("what a client sends", *sent, parts[0][0])
    return results


def _sender(planted: Planted, hyper: Hyper, owner: int) -> Any:
    """Compiles `(state, is_included, stage, key) -> ` what a client sends, or its own model."""
    algorithm, examples = planted.algorithm, jax.device_put(examples_of(planted.data))

    @jax.jit
    def send(state, is_included, stage, key):
        coins = jnp.arange(len(planted.owners)) < jnp.where(is_included, 1, 0)
        held = examples.replace(arrays=examples.arrays | {MARK: planted.marks(coins)})
        own = None if state.clients is None else trees.take(state.clients, owner)
        client = held.client(owner, stage)
        message = received(algorithm.message_to(state.server, own, client))
        output = run_client(algorithm, message, own, client, hyper, key)
        sent = () if planted.sends_votes else output.update
        is_silent = not jax.tree.leaves(output.update)
        return sent, output.weight, output.state if is_silent else ()

    return send
