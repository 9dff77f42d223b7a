"""Canary records that show in clients' messages: mislabelled ones, and inputs behind votes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, model_of
from fedjax_dp.audit.canaries import (
    MARK,
    STRENGTH,
    Planted,
    draw_trained,
    flat,
    models_in,
    read_mark,
    released,
    watch_records,
)
from fedjax_dp.clients.client_data import PublicClient
from fedjax_dp.core import checks, masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Batch
from fedjax_dp.server.mean import ModelChoice

# The array that holds the label of the record that replaces a canary under replace-one.
OTHER = "other_label"
# Queried distances of a parameter, with their negatives and 0: at any step size, some of them are
# near the effects of noise and of a canary.
_DISTANCES = 2.0 ** np.arange(-15, 5.5, 0.5)
LEVELS = np.concatenate([-_DISTANCES[::-1], [0.0], _DISTANCES])
# The first entry of an auditor's input is this number or less; data are above it.
_FIRST = -(2**20)
# Integers beyond are not exact in float32.
_MOST_INPUTS = 2**23


@checked
def plant_losses(
    make_algorithm: Callable[[Model], FederatedAlgorithm],
    model: Model,
    data: FederatedData,
    participation: Participation,
    num_canaries: Count,
    rng: np.random.Generator,
    *,
    relation: str = "zero_out",
) -> Planted:
    """Adds mislabelled copies of records, which are learned by the model's own loss.

    A canary's gradient is that of the network, so that everything between a record and an update is
    attacked: per-example gradients, their norms, clipping, sums and noise. An attacker
    who knows the canary and the model that a client starts from projects what the client sends on
    that gradient, and likewise the change of the client's own model. Where the client
    chooses one of several models, it sees the choice beside the update: whether the canary's
    prediction is right under the chosen model, more often than under all.

    Under zero-out a canary that is not included has no loss and counts as predicted wrongly; under
    replace-one it has its right label.

    Args:
      make_algorithm: `(model) -> algorithm` that claims privacy for records.
      model: the model to train.
      data: the clients' examples; canaries go to clients that have some, in turn. Integers under
        "y", one for each example, are labels; other targets are unchanged.
      participation: how clients are drawn for a round.
      num_canaries: at least 1.
      rng: draws which record of its client a canary is a copy of.
      relation: which data are neighbours, "zero_out" or "replace_one".

    Returns:
      The planted population; canaries are the last records of their clients.

    Raises:
      ValueError: if the algorithm claims nothing for records or sends no update, or, under
        replace-one, data have no labels to draw a wrong one from.
    """
    require_public_sizes(relation)
    is_exchanged = relation == "replace_one"
    algorithm = make_algorithm(_with_absent(model, is_exchanged))
    params = jax.eval_shape(model.init, jax.random.key(0))

    def read(
        server: PyTree, output: ClientOutput, own: PyTree, client: PublicClient, canaries: jax.Array
    ):
        sent, kept = released(output, own, params)
        start = _start(algorithm, server, own, output, client)
        parts = [] if sent is None else [_along(model, start, sent, records, canaries)]
        if kept is not None:
            parts.append(_along(model, models_in(own, params)[0], kept, records, canaries))
        if isinstance(output.update, ModelChoice):
            parts.append(_correctness(model, server.models, output.update.model, records, canaries))
        return jnp.stack(parts)

    planted = watch_records(algorithm, data, participation, num_canaries, read, relation)
    examples = {name: np.array(array) for name, array in planted.data.examples.items()}
    mark = examples[MARK]
    _choose_records(examples, planted, rng)
    labels = examples.get("y")
    has_labels = labels is not None and labels.shape == mark.shape and _are_labels(labels)
    rule = "hold integer labels of at least two classes under 'y' if a record is exchanged"
    checks.require(has_labels or not is_exchanged, "data", rule, sorted(examples))
    if has_labels and labels is not None:
        known = np.unique(labels)
        if is_exchanged:
            examples[OTHER] = labels.copy()
        class_of = np.searchsorted(known, labels)
        labels[:] = np.where(mark >= 0, known[(class_of + 1) % len(known)], labels)
    order = np.argsort(np.where(mark >= 0, mark, len(mark)), kind="stable")[:num_canaries]
    records = nested({name: jnp.asarray(array[order]) for name, array in examples.items()})
    held = FederatedData(examples, planted.data.offsets, planted.data.client_names)
    return planted._replace(data=held)


def _choose_records(
    examples: dict[str, np.ndarray], planted: Planted, rng: np.random.Generator
) -> None:
    """Makes each canary a copy of some record of its client."""
    offsets = planted.data.offsets
    mark = examples[MARK]
    for row in np.flatnonzero(mark >= 0):
        owner = int(np.searchsorted(offsets, row, side="right")) - 1
        ordinary = np.flatnonzero(mark[offsets[owner] : offsets[owner + 1]] == -1)
        source = offsets[owner] + int(rng.choice(ordinary))
        for name, array in examples.items():
            if name != MARK:
                array[row] = array[source]


def _are_labels(labels: np.ndarray) -> bool:
    """Checks whether an array holds integers of at least two classes, and not too many."""
    if labels.dtype.kind not in "iuf" or not np.all(np.mod(labels, 1) == 0):
        return False
    return 2 <= len(np.unique(labels)) <= max(2, len(labels) // 2)


def _with_absent(model: Model, is_exchanged: bool) -> Model:
    """Wraps a model so that canaries which are not included have no loss, or their right label."""

    def absent(batch: Batch) -> jax.Array:
        is_canary, is_included, _ = read_mark(batch[MARK])
        return is_canary & ~is_included

    def labelled(batch: Batch) -> Batch:
        if not is_exchanged:
            return batch
        return {**batch, "y": jnp.where(absent(batch), batch[OTHER], batch["y"])}

    def loss_fn(outputs, batch):
        losses = model.loss_fn(outputs, labelled(batch))
        return losses if is_exchanged else jnp.where(absent(batch), 0.0, losses)

    def correct_fn(outputs, batch):
        assert model.correct_fn is not None
        correct, weight = model.correct_fn(outputs, labelled(batch))
        if not is_exchanged:
            correct = jnp.where(absent(batch), jnp.zeros_like(correct), correct)
        return correct, weight

    return model._replace(
        loss_fn=loss_fn, correct_fn=None if model.correct_fn is None else correct_fn
    )


def _start(
    algorithm: FederatedAlgorithm,
    server: PyTree,
    own: PyTree,
    output: ClientOutput,
    client: PublicClient,
) -> PyTree:
    """Finds the model that a client's update starts from."""
    if isinstance(output.update, ModelChoice):
        return trees.take(server.models, output.update.model)
    if algorithm.views.shared is not None and algorithm.views.shared.is_whole:
        return algorithm.views.shared.read(server)
    assert algorithm.views.personal is not None
    return masks.parted(model_of(algorithm.views.personal(server, own, client)))[0]


def _single(records: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda a: a[index][None], records)


def _along(
    model: Model, start: PyTree, moved: PyTree, records: PyTree, canaries: jax.Array
) -> jax.Array:
    """The distance that a model moved against the gradient of each canary, `[canaries]`."""

    def one(index):
        gradient = jax.grad(lambda p: model.losses(p, _single(records, index))[0][0])(start)
        gradient = jax.tree.map(trees.at_least_float32, gradient)
        product = jax.tree.map(lambda g, m: g * m, gradient, moved)
        return -trees.total(product) / jnp.maximum(trees.l2_norm(gradient), 1e-30)

    return jax.lax.map(one, canaries)


def _correctness(
    model: Model, models: PyTree, chosen: jax.Array, records: PyTree, canaries: jax.Array
) -> jax.Array:
    """The correctness of the chosen model on each canary minus the mean of all, `[canaries]`."""

    def one(index):
        single = _single(records, index)

        def of_model(params):
            if model.correct_fn is None:
                return -model.losses(params, single)[0][0]
            correct, _ = model.correct_fn(model.predict(params, single["x"]), single)
            return correct[0].astype(jnp.float32)

        each = jax.lax.map(of_model, models)
        return each[chosen] - jnp.mean(each)

    return jax.lax.map(one, canaries)


@checked
def plant_votes(
    make_algorithm: Callable[[Model, np.ndarray], FederatedAlgorithm],
    model: Model,
    data: FederatedData,
    participation: Participation,
    num_canaries: int,
    num_rounds: Count,
    rng: np.random.Generator,
    *,
    relation: str = "zero_out",
) -> Planted:
    """Adds records that move one parameter each, and queries clients for votes on its value.

    Privacy must hold for every model and every public input, so both are the auditor's. On inputs
    that occur in no data, the wrapped model reveals how far one parameter has moved from 0, where
    it starts. A canary's record is such an input, with a loss far above the clip norm; the public
    inputs of every round ask, for every canary's parameter, whether it has moved further than each
    of `LEVELS`. Only the votes are observed.

    Args:
      make_algorithm: `(model, public_x) -> algorithm` that claims privacy for records and whose
        clients send votes, `[queries of a round, classes]`.
      model: the model to train; inputs are one array `[examples, ...]`, outputs are logits
        `[examples, classes]` or log-odds `[examples]`.
      data: the clients' examples; canaries go to clients that have some, in turn.
      participation: how clients are drawn for a round.
      num_canaries: at least 1, at most the number of trained parameters.
      num_rounds: the number of rounds among which the algorithm divides its public inputs, at least
        1.
      rng: draws the parameters.
      relation: which data are neighbours, "zero_out" or "replace_one".

    Returns:
      The planted population; canaries are the last records of their clients.

    Raises:
      ValueError: if the algorithm claims nothing for records, data reach the numbers that mark the
        auditor's inputs, or an argument is not valid; when rounds run, if their inputs are not
        divided into `num_rounds`.
    """
    require_public_sizes(relation)
    coordinates = draw_trained(model, num_canaries, rng)
    num_queries = num_canaries * LEVELS.size
    rule = f"be at most {_MOST_INPUTS // LEVELS.size}, since each takes {LEVELS.size} queries"
    checks.require(num_queries + num_canaries <= _MOST_INPUTS, "num_canaries", rule, num_canaries)
    x = data.examples["x"]
    lowest = float(np.min(np.asarray(x), initial=0))
    checks.require(lowest > _FIRST, "data", f"hold inputs above {_FIRST}", lowest)
    # Queries by canary and level, and after them the inputs of the canaries' own records.
    levels = np.concatenate([np.tile(LEVELS, num_canaries), np.zeros(num_canaries)])
    shown = np.concatenate([np.repeat(coordinates, LEVELS.size), coordinates])
    wrapped = _with_windows(model, x.dtype, shown, levels.astype(np.float32), relation)
    queries = np.tile(_inputs(np.arange(num_queries), x), (num_rounds,) + (1,) * (x.ndim - 1))
    algorithm = make_algorithm(wrapped, queries)

    def read(server, output: ClientOutput, own: PyTree, client: PublicClient, canaries: jax.Array):
        """The highest level that, by the votes, the parameter has passed."""
        del server, own, client
        asked = jnp.shape(output.update)[:1]
        rule = f"be such that a round queries {num_queries} inputs"
        checks.require(asked == (num_queries,), "num_rounds", rule, asked)
        votes = output.update.reshape(num_canaries, LEVELS.size, -1)[canaries]
        is_passed = votes[..., 1] > votes[..., 0]
        lowest, steps = 2 * LEVELS[0], np.diff(LEVELS, prepend=2 * LEVELS[0])
        return lowest + is_passed @ jnp.asarray(steps, jnp.float32)

    planted = watch_records(algorithm, data, participation, num_canaries, read, relation)
    marks = planted.data.examples[MARK]
    is_canary = marks >= 0
    grown = np.asarray(planted.data.examples["x"]).astype(_wide(x.dtype))
    grown[is_canary] = _inputs(num_queries + marks[is_canary], x)
    examples = {**planted.data.examples, "x": grown}
    held = FederatedData(examples, planted.data.offsets, planted.data.client_names)
    return planted._replace(data=held, sends_votes=True)


def _wide(dtype: np.dtype) -> np.dtype:
    """A type that holds the data and the numbers of the auditor's inputs."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(np.float32 if is_float else np.int32)


def _inputs(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Writes the numbers of the auditor's inputs into their first entries, `[numbers, ...]`."""
    inputs = np.zeros((len(numbers), *x.shape[1:]), _wide(x.dtype))
    inputs.reshape(len(numbers), -1)[:, 0] = _FIRST - numbers
    return inputs


def _with_windows(
    model: Model, dtype: np.dtype, shown: np.ndarray, levels: np.ndarray, relation: str
) -> Model:
    """Wraps a model so that the auditor's inputs show how far a parameter is beyond a level."""
    opposite = 0.0 if relation != "replace_one" else -1.0

    def init(key: PRNGKey) -> PyTree:
        params = model.init(key)
        leaves, structure = jax.tree.flatten(params)
        first, zeroed = 0, []
        for leaf in leaves:
            here = shown[(shown >= first) & (shown < first + leaf.size)] - first
            zeroed.append(leaf.reshape(-1).at[here].set(0).reshape(leaf.shape))
            first += leaf.size
        return jax.tree.unflatten(structure, zeroed)

    def apply(params, x, **options):
        number = _FIRST - x.reshape(len(x), -1)[:, 0].astype(jnp.float32)
        is_window = number >= 0
        ordinary = jnp.where(is_window.reshape((-1,) + (1,) * (x.ndim - 1)), 0, x).astype(dtype)
        outputs, refreshed = model.apply(params, ordinary, **options)
        query = jnp.clip(number, 0, len(shown) - 1).astype(jnp.int32)
        # Descent moves a parameter against the gradient of its canary.
        beyond = -flat(params)[jnp.asarray(shown)[query]] - jnp.asarray(levels)[query]
        if outputs.ndim == 2 and outputs.shape[1] > 1:
            windows = jnp.zeros_like(outputs).at[:, 1].set(beyond.astype(outputs.dtype))
            return jnp.where(is_window[:, None], windows, outputs), refreshed
        windows = beyond.astype(outputs.dtype).reshape(outputs.shape)
        return jnp.where(is_window.reshape(outputs.shape), windows, outputs), refreshed

    def loss_fn(outputs, batch):
        losses = model.loss_fn(outputs, batch)
        if MARK not in batch:
            return losses
        is_canary, is_included, _ = read_mark(batch[MARK])
        sign = jnp.where(is_included, 1.0, opposite)
        beyond = outputs[:, 1] if outputs.ndim == 2 and outputs.shape[1] > 1 else outputs
        return jnp.where(is_canary, -STRENGTH * sign * beyond.reshape(losses.shape), losses)

    return model._replace(init=init, apply=apply, loss_fn=loss_fn)
