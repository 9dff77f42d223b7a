"""Canary records behind votes: public inputs made by the auditor that reveal one parameter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.audit.canaries import (
    MARK,
    STRENGTH,
    Planted,
    draw_trained,
    flat,
    read_mark,
    watch_records,
)
from fedjax_dp.clients.client_data import PublicClient
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.models.base import Model

# Queried distances of a parameter, with their negatives and 0: at any step size, some of them are
# near the effects of noise and of a canary.
_DISTANCES = 2.0 ** np.arange(-15, 5.5, 0.5)
LEVELS = np.concatenate([-_DISTANCES[::-1], [0.0], _DISTANCES])
# The first entry of an auditor's input is this number or less; data are above it.
_FIRST = -(2**20)
# Integers beyond are not exact in float32.
_MOST_INPUTS = 2**23


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
