"""Mislabelled canary records: real inputs, a wrong label, the model's own loss."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.audit.canaries import MARK, Planted, models_in, read_mark, released, watch_records
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
    return masks.parted(algorithm.views.personal(server, own, client))[0]


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
