"""Exact loss and accuracy of one model, or of everybody's own, in compiled batches."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models.base import Model


class Evaluation(NamedTuple):
    """Exact results on held-out data; none of them is private.

    Attributes:
      loss: mean loss over all examples.
      accuracy: share of correct predictions over all examples; NaN where the model has none.
      client_loss: mean loss of each client, `[num_clients]`; NaN for a client without examples.
      client_accuracy: accuracy of each client, `[num_clients]`; NaN likewise.
      client_sizes: examples of each client, `[num_clients]`.
    """

    loss: float
    accuracy: float
    client_loss: np.ndarray
    client_accuracy: np.ndarray
    client_sizes: np.ndarray


class _PerExample(NamedTuple):
    """Losses, correct predictions and weights of predictions, of each example or summed."""

    loss: Any
    correct: Any
    weight: Any


def _per_example(model: Model, params: PyTree, batch: Any, is_real: Any) -> _PerExample:
    outputs, _ = model.apply(params, batch["x"])
    losses = model.loss_fn(outputs, batch)
    if model.correct_fn is None:
        correct = weight = jnp.zeros_like(losses)
    else:
        correct, weight = model.correct_fn(outputs, batch)
    return _PerExample(
        *(jnp.where(is_real, v, 0.0).astype(jnp.float32) for v in (losses, correct, weight))
    )


def _num_rows(data: FederatedData) -> int:
    return max(1, data.num_examples)


def _examples(data: FederatedData) -> Any:
    """Puts the examples on the device; a store without any gets a row that nobody owns."""
    if data.num_examples == 0:
        empty = {k: np.zeros((1, *v.shape[1:]), v.dtype) for k, v in data.examples.items()}
        return jax.device_put(empty)
    return jax.device_put({k: np.asarray(v) for k, v in data.examples.items()})


def _result(sums: _PerExample, sizes: np.ndarray) -> Evaluation:
    loss, correct, weight = (np.asarray(s, dtype=np.float64) for s in sums)

    def ratio(numerator, denominator):
        return np.where(denominator > 0, numerator / np.maximum(denominator, 1e-30), np.nan)

    return Evaluation(
        loss=float(ratio(loss.sum(), sizes.sum())),
        accuracy=float(ratio(correct.sum(), weight.sum())),
        client_loss=ratio(loss, sizes),
        client_accuracy=ratio(correct, weight),
        client_sizes=sizes,
    )


def shared_evaluator(
    model: Model, data: FederatedData, *, block_size: int = 512
) -> Callable[[PyTree], Evaluation]:
    """Compiles the evaluation of one model on the data of every client.

    Args:
      model: the model.
      data: held-out examples by client; a store of one client evaluates on a whole.
      block_size: examples that are computed at once; bounds memory, changes nothing else.

    Returns:
      `(params) -> Evaluation`.
    """
    checks.whole("block_size", block_size)
    block = min(block_size, max(1, data.num_examples))
    num_blocks = -(-data.num_examples // block)
    examples, client_of_example = _examples(data), data.client_of_example

    @jax.jit
    def values_of(params, examples):
        def body(i, values):
            # The last block starts early enough to be full; what it sees again stays the same.
            first = jnp.minimum(i * block, _num_rows(data) - block)
            batch = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, block), examples)
            each = _per_example(model, params, batch, True)
            return jax.tree.map(
                lambda all_, v: jax.lax.dynamic_update_slice_in_dim(all_, v, first, 0), values, each
            )

        zeros = _PerExample(*(jnp.zeros(_num_rows(data), jnp.float32),) * 3)
        return jax.lax.fori_loop(0, num_blocks, body, zeros)

    def evaluate(params: PyTree) -> Evaluation:
        # Summed on the host in float64: a float32 sum over a large client would lose examples.
        values = (np.asarray(v)[: data.num_examples] for v in values_of(params, examples))
        sums = (np.bincount(client_of_example, v, data.num_clients) for v in values)
        return _result(_PerExample(*sums), data.sizes)

    return evaluate


def personal_evaluator(
    model: Model,
    data: FederatedData,
    params_of: Callable[..., PyTree],
    *,
    block_size: int = 128,
    in_parts: Callable[..., Iterable[tuple[np.ndarray, tuple[Any, ...]]]] | None = None,
) -> Callable[..., Evaluation]:
    """Compiles the evaluation of each client's own model on its own data.

    Args:
      model: the model.
      data: held-out examples by client.
      params_of: `(client_index, *arguments) -> params`, the model that a client would use.
      block_size: examples that are computed at once; bounds memory, changes nothing else.
      in_parts: `(*arguments) -> (clients, arguments) …`, which clients are evaluated together and
        what `params_of` is handed for them, each client at least once; all together with the
        arguments themselves where it is None.

    Returns:
      `(*arguments) -> Evaluation`, the arguments being handed to `params_of`.
    """
    checks.whole("block_size", block_size)
    block = min(block_size, max(1, int(data.sizes.max())))
    examples = _examples(data)
    starts = jax.device_put(data.offsets[:-1].astype(np.int32))
    sizes = jax.device_put(data.sizes.astype(np.int32))

    @jax.jit
    def sums_of(examples, starts, sizes, clients, *arguments):
        def one_client(index):
            params = params_of(index, *arguments)

            def body(i, total):
                rows = i * block + jnp.arange(block)
                where = jnp.clip(starts[index] + rows, 0, _num_rows(data) - 1)
                batch = jax.tree.map(lambda a: a[where], examples)
                each = _per_example(model, params, batch, rows < sizes[index])
                return jax.tree.map(lambda t, v: t + jnp.sum(v), total, each)

            zeros = _PerExample(*(jnp.float32(0),) * 3)
            return jax.lax.fori_loop(0, -(-sizes[index] // block), body, zeros)

        return jax.lax.map(one_client, clients)

    everybody = np.arange(data.num_clients, dtype=np.int32)

    def evaluate(*arguments: Any) -> Evaluation:
        sums = np.zeros((3, data.num_clients), np.float32)
        for clients, own in [(everybody, arguments)] if in_parts is None else in_parts(*arguments):
            sums[:, clients] = np.stack(sums_of(examples, starts, sizes, clients, *own))
        return _result(_PerExample(*sums), data.sizes)

    return evaluate
