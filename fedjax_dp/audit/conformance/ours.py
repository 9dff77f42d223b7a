"""Parts of this package as subjects, checked by the same door as those of others."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.audit.conformance.claims import (
    AdaptiveRelease,
    FixedSize,
    Masked,
    MaskLaw,
    Poisson,
    Release,
    SamplingLaw,
    Shuffled,
)
from fedjax_dp.audit.conformance.subjects import (
    AdaptiveAggregation,
    Aggregation,
    Masking,
    MaskSource,
    Sampling,
    Step,
)
from fedjax_dp.audit.noise import stated_multiplier
from fedjax_dp.audit.steps import round_of
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.gradients import GradientRule
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Size
from fedjax_dp.data import sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import participation
from fedjax_dp.data.sampling import Sampler
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.sensitivities import Sensitivity
from fedjax_dp.server.base import (
    Close,
    Fate,
    Roster,
    Sender,
    Summed,
    stateless,
    update_alone,
)
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.secure import masks
from fedjax_dp.server.secure.aggregator import masked
from fedjax_dp.server.secure.graphs import MaskGraph
from fedjax_dp.server.secure.key_agreement import MaskKeys

# Checks hand over up to twice the claimed number of rows.
_SPARE = 2


@checked
def aggregation_of(
    name: str, aggregator: Summed, shapes: Sequence[tuple[int, ...]], *, rows: Count = 8
) -> Aggregation | AdaptiveAggregation:
    """Views an aggregator as a subject: rounds of the engine, whose clients send given updates.

    Args:
      name: of the subject.
      aggregator: one that claims Gaussian or Laplace noise for clients.
      shapes: of the arrays of an update.
      rows: clients of a round, at least 3.

    Returns:
      The subject; an adaptive one if the aggregator has a state, which is then its clip norm.

    Raises:
      ValueError: if the aggregator has no such claim.
    """
    claim = aggregator.claim
    rule = "claim privacy for clients by noise that the server draws afresh in every round"
    is_plain = (
        isinstance(claim, ClientClaim) and claim.min_separation == 1 and not claim.min_participants
    )
    checks.require(is_plain, "aggregator", rule, claim)
    assert isinstance(claim, ClientClaim)
    slots, layers, numbers = _SPARE * rows, _sizes(shapes), aggregator.numbers
    divisor = 1.0 if claim.divisor is None else float(claim.divisor(numbers))
    bound = claim.sensitivity(aggregator.init(_zeros(shapes)), numbers)
    first = _release(bound, claim.event(numbers), divisor, layers, rows)
    model = _linear(shapes)
    algorithm = fedavg(model, local_trainer(model, LocalConfig()), aggregator=aggregator)
    records = {"x": np.zeros((1, sum(layers)), np.float32)}
    joining = participation(sampling.full_participation(), slots, slots)
    data = FederatedData.from_clients([records] * slots)
    start = federation(algorithm, data, joining).init(jax.random.key(0), Layout())
    cohort = round_of(algorithm, slots)

    @jax.jit
    def one(state, updates, is_there, key):
        shaped = jax.vmap(lambda row: _shaped(row, shapes))(updates)
        (aggregate, after), info = cohort(state, shaped, jnp.ones(slots), is_there, key)
        return state._replace(aggregator=after), _flat(aggregate), info

    if not jax.tree.leaves(start.aggregator):

        def aggregate(updates, seed):
            return np.asarray(one(start, *_padded(updates, slots), jax.random.key(seed))[1])

        return Aggregation(name, aggregate, first)

    def aggregate_rounds(rounds, seed):
        state, aggregates, norms = start, [], []
        for i, updates in enumerate(rounds):
            bound = claim.sensitivity(state.aggregator, numbers)
            norms.append(float(np.asarray(bound.contribution)))
            key = jax.random.fold_in(jax.random.key(seed), i)
            state, released, _ = one(state, *_padded(updates, slots), key)
            aggregates.append(np.asarray(released))
        return np.stack(aggregates), np.array(norms)

    # The event also pays for the count that the clip norm follows, and the noise is larger for it.
    nobody = _padded(np.zeros((0, sum(layers)), np.float32), slots)
    stated = float(one(start, *nobody, jax.random.key(0))[2]["noise_stddev"])
    after = dataclasses.replace(first, noise_stddev=stated * divisor)
    # What the count, to which a client adds 1/2 or -1/2, costs of the event.
    squares = [(release.clip_norm / release.noise_stddev) ** 2 for release in (first, after)]
    left = max(squares[0] - squares[1], 1e-12)
    return AdaptiveAggregation(name, aggregate_rounds, AdaptiveRelease(after, left**-0.5 / 2))


@checked
def step_of(
    name: str,
    rule: Callable[[Model], GradientRule],
    config: LocalConfig,
    shapes: Sequence[tuple[int, ...]],
    *,
    rows: Count = 8,
) -> Step:
    """Views a gradient rule as a subject, on a loss whose gradient is the record.

    Args:
      name: of the subject.
      rule: `(model) -> GradientRule`, such as `clients.clipped`; one that claims privacy.
      config: clip norm, noise multiplier and batch size.
      shapes: of the parameters.
      rows: records of a batch, at least 3.

    Returns:
      The subject.

    Raises:
      ValueError: if the rule claims nothing.
    """
    params, made = _zeros(shapes), rule(_linear(shapes))
    stated = "state a bound and an event"
    checks.require(made.bound is not None and made.event is not None, "rule", stated, name)
    assert made.bound is not None and made.event is not None
    claim = _release(
        made.bound(config), made.event(config), float(config.batch_size), _sizes(shapes), rows
    )

    @jax.jit
    def run(batch, is_real, key):
        total = made.micro_batch(params, batch, is_real, key, config).gradient
        return _flat(made.release(total, jnp.sum(is_real), config, key))

    def step(records, seed):
        padded, is_real = _padded(records, _SPARE * rows)
        return np.asarray(run({"x": padded}, is_real, jax.random.key(seed)))

    return Step(name, step, claim)


@checked
def sampling_of(name: str, sampler: Sampler, num_units: Count, size: Size) -> Sampling:
    """Views a sampler as a subject.

    Args:
      name: of the subject.
      sampler: such as `poisson()`, `fixed_size()` or `shuffled()`.
      num_units: the population.
      size: the expected number drawn, at least 1.

    Returns:
      The subject, with the law of the sampler's event.

    Raises:
      ValueError: if no law of these checks is the sampler's.
    """
    slots = sampler.capacity(num_units, math.ceil(size))

    @jax.jit
    def one(state, key, step):
        return sampler.draw(state, key, step, jnp.int32(num_units), size, num_units, slots)

    def draw(rounds, seed):
        state, drawn = sampler.init(num_units), []
        for step in range(rounds):
            state, found = one(state, jax.random.key(seed), step)
            drawn.append(np.asarray(found.indices)[np.asarray(found.is_real)])
        return drawn

    return Sampling(name, draw, _law(sampler, num_units, size))


@checked
def masking_of(
    name: str, graph: MaskGraph, *, keys: MaskKeys | None = None, size: Count = 8
) -> Masking:
    """Views secure aggregation as a subject: integers of 32 bits under the masks of `masked`.

    Args:
      name: of the subject.
      graph: of the pairs that share masks, all of whose clients are notified in every round.
      keys: the seeds of masks, of clients 0 to n − 1; simulated ones where None.
      size: integers of a message, at least 1.

    Returns:
      The subject, whose seeds are the public keys of rounds; as many clients may drop out as the
      graph allows.
    """
    integers = Summed(
        stateless,
        lambda state, numbers, update, sender: update,
        lambda state, numbers, total, close: (state, total, {}),
        message=update_alone,
    )
    clients = jnp.arange(graph.num_clients)
    aggregator = masked(integers, fixed_point(graph.num_clients), graph, keys=keys)
    encode, roster = aggregator.encode, Roster(clients, clients >= 0)
    assert encode is not None

    @jax.jit
    def round_of_masks(values, is_dropped, key):
        def message(client, row):
            return encode((), {}, row, Sender(client, jnp.float32(1), key, key, roster))

        sent = jax.vmap(message)(clients, values)
        arrived = jax.vmap(trees.where)(is_dropped, trees.zeros_like(sent), sent)
        fates = jnp.where(is_dropped, Fate.DROPPED, Fate.CONTRIBUTED)
        close = Close(roster, fates, key, key)
        total = sums.value(sums.over_first_axis(arrived))
        return sent[0].values, aggregator.combine((), {}, total, close)[1]

    def mask(values, is_dropped, seed):
        return round_of_masks(np.uint32(values), is_dropped, jax.random.key(seed))

    return Masking(name, mask, Masked(2**32, graph.num_clients, size, graph.dropouts))


@checked
def mask_source_of(
    name: str, keys: Callable[[int], MaskKeys], *, count: Count = 2**12, size: Count = 8
) -> MaskSource:
    """Views the masks of pairs as a subject, each pair of clients with a seed of its own.

    Args:
      name: of the subject.
      keys: `(number of clients) -> seeds`, such as `server.secure.agreed_keys`.
      count: pairs, each of which draws one mask; at least 64.
      size: integers of a mask, at least 1.

    Returns:
      The subject.

    Raises:
      ValueError: if there are fewer pairs.
    """

    def draw(count, seed):
        clients = math.isqrt(2 * count) + 2
        made, pairs = keys(clients), np.stack(np.tril_indices(clients, -1))[:, :count]

        @jax.jit
        def drawn(key):
            return jax.vmap(lambda i, j: masks.stream(made.of_pair(key, i, j), size))(*pairs)

        return np.asarray(drawn(jax.random.key(seed)))

    return MaskSource(name, draw, MaskLaw(2**32, count, size))


def _law(sampler: Sampler, num_units: int, size: float) -> SamplingLaw:
    """The law that a sampler's event stands for."""
    if sampler.name == "shuffled":
        return Shuffled(num_units, int(size))
    event = sampler.event(dp_accounting.GaussianDpEvent(1.0), num_units, size)
    match event:
        case dp_accounting.PoissonSampledDpEvent():
            return Poisson(num_units, event.sampling_probability)
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return FixedSize(num_units, event.sample_size)
        case dp_accounting.GaussianDpEvent() if size == num_units:
            return FixedSize(num_units, num_units)
    raise ValueError(f"sampler must draw by a law of these checks, got {sampler.name}")


def _release(
    sensitivity: Sensitivity,
    event: DpEvent,
    divisor: float,
    layers: tuple[int, ...],
    rows: int,
) -> Release:
    """The claim of a sensitivity and an event."""
    clip_norm = float(np.asarray(sensitivity.contribution))
    multiplier = stated_multiplier(event)
    relation: Any = sensitivity.relation
    if multiplier:
        return Release(clip_norm, multiplier * clip_norm, divisor, layers, rows, relation)
    is_laplace = isinstance(event, dp_accounting.LaplaceDpEvent)
    checks.require(is_laplace, "event", "state Gaussian or Laplace noise", event)
    stddev = math.sqrt(2) * event.noise_multiplier * clip_norm
    return Release(clip_norm, stddev, divisor, layers, rows, relation, "l1", "laplace")


def _padded(rows: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in slots, and which of them are there."""
    checks.require(len(rows) <= slots, "rows", f"be at most {slots}", len(rows))
    padded = np.zeros((slots, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded, np.arange(slots) < len(rows)


def _sizes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape in shapes)


def _zeros(shapes: Sequence[tuple[int, ...]]) -> dict[str, jax.Array]:
    return {f"layer{i:03}": jnp.zeros(shape) for i, shape in enumerate(shapes)}


def _shaped(row: jax.Array, shapes: Sequence[tuple[int, ...]]) -> dict[str, jax.Array]:
    parts = jnp.split(row, np.cumsum(_sizes(shapes))[:-1])
    pairs = zip(parts, shapes, strict=True)
    return {f"layer{i:03}": part.reshape(s) for i, (part, s) in enumerate(pairs)}


def _flat(tree: Any) -> jax.Array:
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])


def _linear(shapes: Sequence[tuple[int, ...]]) -> Model:
    """A model whose loss is the inner product of parameters and record."""

    return Model.from_functions(
        lambda key: _zeros(shapes),
        lambda params, x: x @ _flat(params),
        loss=lambda outputs, batch: outputs,
        name="linear",
    )
