"""Exact loss and accuracy, with checks of targets before; fairness and heterogeneity of clients."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import disk_arrays
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.evaluation.metrics import AnyMetric, Metric, RowsMetric, require_fits, terms_of
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Allowed, reads
from fedjax_dp.models.weights import unweighted

# The most examples on the device at once; larger data are evaluated in parts.
_PART_BYTES = 2**28


def require_fitting(
    model: Model,
    data: FederatedData,
    per_example: Callable[[PyTree, Any], Any] | None = None,
    *,
    what: str = "data",
    on_disk: bool = False,
) -> tuple[Allowed, ...]:
    """Requires targets that a function of parameters and a batch is for, by default the losses.

    It is traced on one example. Returns what it is for, for targets that are on disk.
    """
    one = {
        name: jax.ShapeDtypeStruct((1, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in data.examples.items()
    }

    def traced(constants: Any, params: PyTree, batch: Any) -> Any:
        with model.given(constants):
            return (per_example or model.losses)(params, batch)

    params = jax.eval_shape(model.init, jax.random.key(0))
    with reads() as found:
        jax.eval_shape(traced, model.constants, params, nested(one))
    require_targets(what, data, found, on_disk=on_disk)
    return tuple(found)


def require_targets(
    what: str, data: FederatedData, allowed: Iterable[Allowed], *, on_disk: bool = False
) -> None:
    """Requires targets that losses are for, in memory, and on disk if they are to be read."""
    for each in dict.fromkeys(allowed):
        array = data.examples.get(each.name)
        if array is not None and (on_disk or not is_on_disk(array)):
            _require(what, each, disk_arrays.parts(array), data.offsets)


def require_rows(what: str, arrays: Mapping[str, Any], allowed: Iterable[Allowed]) -> None:
    """Requires the same of rows that have been read from disk."""
    for each in dict.fromkeys(allowed):
        if each.name in arrays:
            _require(what, each, [arrays[each.name]], None)


def _require(what: str, allowed: Allowed, parts: Iterable[Any], offsets: np.ndarray | None) -> None:
    first_wrong, count, start, num_left_out = "", 0, 0, 0
    for part in parts:
        if not allowed.is_declared:
            num_left_out += int(np.count_nonzero(np.asarray(part) == allowed.ignore_label))
        wrong = allowed.wrong(part)
        by_row = wrong.reshape(len(wrong), -1).any(axis=1)
        if by_row.any() and not first_wrong:
            row = int(np.argmax(by_row))
            value = np.asarray(part)[row].reshape(-1)[np.argmax(wrong[row].reshape(-1))]
            place = "" if offsets is None else _place(start + row, offsets)
            first_wrong = f"{value.item()!r}{place}"
        count, start = count + int(by_row.sum()), start + len(wrong)
    if num_left_out:
        warnings.warn(
            f"{what}[{allowed.name!r}] has no target, {allowed.ignore_label}, in {num_left_out} "
            "places, which the loss leaves out; Loss(…, ignore_label=…) as the loss of the model "
            "says that this is meant",
            stacklevel=2,
        )
    if count:
        others = f", the first of {count} such rows of {start}" if count > 1 else ""
        public = f"{what}[{allowed.name!r}] must {allowed.rule}"
        way_out = "; Loss(…, ignore_label=…) as the loss of the model declares a label to leave out"
        way_out *= not allowed.numbers
        raise GuardedError(f"{public}, got {first_wrong}{others}{way_out}", public)


def _place(row: int, offsets: np.ndarray) -> str:
    client = int(np.searchsorted(offsets, row, side="right")) - 1
    return f" in row {row} (client {client})"


class Evaluation(NamedTuple):
    """Exact results on data of clients; none of them is private.

    Attributes:
      loss: mean loss over all examples.
      accuracy: share of correct predictions over all examples; NaN if the model has no accuracy.
      client_loss: mean loss of each client, `[num_clients]`; NaN for a client without examples.
      client_accuracy: accuracy of each client, `[num_clients]`; NaN for a client without examples.
      client_sizes: examples of each client, `[num_clients]`.
      metrics: other metrics over all examples, by name; numbers, or tables.
      client_metrics: the same of each client, by name: `[num_clients]`, NaN where it has no
        meaning, such as the AUC of a client with one class; or a list of tables.
      largest_is_worst: the metrics whose larger values are worse.
    """

    loss: float
    accuracy: float
    client_loss: np.ndarray
    client_accuracy: np.ndarray
    client_sizes: np.ndarray
    metrics: Mapping[str, Any] = {}
    client_metrics: Mapping[str, Any] = {}
    largest_is_worst: frozenset[str] = frozenset()


class _PerExample(NamedTuple):
    """Losses, correct predictions, weights and terms of metrics; by example or summed."""

    loss: Any
    correct: Any
    weight: Any
    more: Mapping[str, Any] = {}
    rows: Mapping[str, Any] = {}  # Of metrics that read those of all examples; never summed.


def _per_example(
    model: Model, metrics: Mapping[str, AnyMetric], params: PyTree, batch: Any, is_real: Any
) -> _PerExample:
    outputs, _ = model.apply(params, batch["x"])
    losses = unweighted(model.loss_fn)(outputs, batch)
    if model.correct_fn is None:
        correct = weight = jnp.zeros_like(losses)
    else:
        correct, weight = model.correct_fn(outputs, batch)
    more = terms_of(metrics, model, outputs, batch)
    for name, each in more.items():
        fits = each.ndim == 2 and each.shape[0] == losses.shape[0]
        rule = f"have a row for each of {losses.shape[0]} examples"
        checks.require(fits, f"the terms of metric {name}", rule, each.shape)
        fits = not jnp.iscomplexobj(each)
        checks.require(fits, f"the terms of metric {name}", "be real numbers", each.dtype)

    def real(value):
        flags = jnp.reshape(is_real, jnp.shape(is_real) + (1,) * (value.ndim - jnp.ndim(is_real)))
        return jnp.where(flags, jnp.asarray(value, jnp.float32), 0.0)

    rows = {name: more.pop(name) for name in _of_rows(metrics)}
    return jax.tree.map(real, _PerExample(losses, correct, weight, more, rows))


def _of_rows(metrics: Mapping[str, AnyMetric]) -> list[str]:
    return [name for name, metric in metrics.items() if isinstance(metric, RowsMetric)]


def _allowed(model: Model, data: FederatedData, metrics: Mapping[str, AnyMetric]) -> list[Allowed]:
    """Requires targets that fit the loss and metrics that fit both; returns the rules for disk."""
    require_fits(metrics, model)
    each = partial(_per_example, model, metrics, is_real=True)
    allowed = require_fitting(model, data, each)
    return [one for one in allowed if is_on_disk(data.examples.get(one.name))]


def _rows(data: FederatedData, first: int, last: int, allowed: Sequence[Allowed]) -> Any:
    """Puts some examples on the device; an empty store gets one of zeros."""
    if data.num_examples == 0:
        empty = {k: np.zeros((1, *v.shape[1:]), v.dtype) for k, v in data.examples.items()}
        return jax.device_put(nested(empty))
    arrays = {k: np.asarray(v[first:last]) for k, v in data.examples.items()}
    require_rows("data", arrays, allowed)
    return jax.device_put(nested(arrays))


def _result(sums: _PerExample, data: FederatedData, metrics: Mapping[str, AnyMetric]) -> Evaluation:
    """Finishes sums by client, `[num_clients, ...]`, and the rows of all examples."""
    sums = jax.tree.map(lambda s: np.asarray(s, dtype=np.float64), sums)
    (loss, correct, weight), sizes = sums[:3], data.sizes

    def ratio(numerator, denominator):
        return np.where(denominator > 0, numerator / np.maximum(denominator, 1e-30), np.nan)

    whole: dict[str, Any] = {}
    of_clients: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            each = sums.more[name]
            whole[name] = float(metric.finish(each.sum(axis=0)))
            of_clients[name] = metric.finish(each)
            continue
        rows = sums.rows[name][: data.num_examples]
        whole[name] = metric.finish(rows)
        found = [metric.finish(own) for own in np.split(rows, data.offsets[1:-1])]
        is_scalar = isinstance(whole[name], float) and all(isinstance(x, float) for x in found)
        of_clients[name] = np.array(found) if is_scalar else found
    return Evaluation(
        loss=float(ratio(loss.sum(), sizes.sum())),
        accuracy=float(ratio(correct.sum(), weight.sum())),
        client_loss=ratio(loss, sizes),
        client_accuracy=ratio(correct, weight),
        client_sizes=sizes,
        metrics=whole,
        client_metrics=of_clients,
        largest_is_worst=frozenset(n for n, m in metrics.items() if m.largest_is_worst),
    )


@checked
def shared_evaluator(
    model: Model,
    data: FederatedData,
    *,
    block_size: Count = 512,
    metrics: Mapping[str, AnyMetric] = {},
) -> Callable[[PyTree], Evaluation]:
    """Compiles the evaluation of one model on the data of every client.

    Args:
      model: the model.
      data: examples by client; one client holds all examples of a common test set. Data too large
        for the device are copied to it in parts.
      block_size: examples computed at once; affects memory only.
      metrics: metrics besides loss and accuracy, by name.

    Returns:
      `(params) -> Evaluation`.

    Raises:
      ValueError: for targets that the loss is not for (if they are on disk, when they are read), or
        a metric that is not for the loss or these targets.
    """
    allowed = _allowed(model, data, metrics)
    block = min(block_size, max(1, data.num_examples))
    num_rows, num_parts = max(1, data.num_examples), -(-data.num_bytes // _PART_BYTES)
    part = max(block, -(-num_rows // max(1, num_parts)))
    num_blocks = -(-min(part, data.num_examples) // block)
    # Placed when it is first evaluated.
    whole = cache(lambda: _rows(data, 0, num_rows, allowed))
    client_of_example, frozen = data.client_of_example, jax.device_put(model.constants)

    @jax.jit
    def values_of(params, examples, constants):
        with model.given(constants):
            return values_in(params, examples)

    def values_in(params, examples):
        def values_at(first):
            batch = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, block), examples)
            return _per_example(model, metrics, params, batch, True)

        def body(i, values):
            # The last block starts early enough to be full; repeated examples get the same values.
            first = jnp.minimum(i * block, part - block)
            return jax.tree.map(
                lambda all_, v: jax.lax.dynamic_update_slice_in_dim(all_, v, first, 0),
                values,
                values_at(first),
            )

        zeros = jax.tree.map(
            lambda v: jnp.zeros((part, *v.shape[1:]), v.dtype),
            jax.eval_shape(values_at, jnp.int32(0)),
        )
        return jax.lax.fori_loop(0, num_blocks, body, zeros)

    def parts(params):
        if part == num_rows:
            yield 0, values_of(params, whole(), frozen)
            return
        for first in range(0, num_rows, part):
            # As with blocks, the last part is full.
            first = min(first, num_rows - part)
            yield first, values_of(params, _rows(data, first, first + part, allowed), frozen)

    def values(params):
        all_values: Any = None
        for first, some in parts(params):
            if all_values is None:
                all_values = jax.tree.map(
                    lambda v: np.empty((num_rows, *v.shape[1:]), v.dtype), some
                )
            for array, new in zip(jax.tree.leaves(all_values), jax.tree.leaves(some), strict=True):
                array[first : first + part] = new
        return all_values

    def by_client(values):
        values = values[: data.num_examples]
        shape = values.shape[1:]
        columns = values.reshape(len(values), int(np.prod(shape))).T
        sums = [np.bincount(client_of_example, c, data.num_clients) for c in columns]
        return np.stack(sums, axis=-1).reshape(data.num_clients, *shape)

    def evaluate(params: PyTree) -> Evaluation:
        # Summed on the host in float64: a float32 sum over a large client would lose examples.
        found = values(params)
        sums = jax.tree.map(by_client, found._replace(rows={}))
        return _result(sums._replace(rows=found.rows), data, metrics)

    return evaluate


@checked
def personal_evaluator(
    model: Model,
    data: FederatedData,
    params_of: Callable[..., PyTree],
    *,
    block_size: Count = 128,
    in_parts: Callable[..., Iterable[tuple[np.ndarray, tuple[Any, ...]]]] | None = None,
    metrics: Mapping[str, AnyMetric] = {},
) -> Callable[..., Evaluation]:
    """Compiles the evaluation of each client's own model on its own data.

    Args:
      model: the model.
      data: examples by client.
      params_of: `(client_index, *arguments) -> params`, the model of a client.
      block_size: examples computed at once; affects memory only.
      in_parts: `(*arguments) -> (clients, arguments) …`, groups of consecutive clients to evaluate
        together, each with its arguments of `params_of`; every client occurs at least once. None
        for all clients at once.
      metrics: metrics besides loss and accuracy, by name.

    Returns:
      `(*arguments) -> Evaluation`, of the arguments of `params_of`.

    Raises:
      ValueError: as `shared_evaluator`.
    """
    allowed = _allowed(model, data, metrics)
    block = min(block_size, max(1, int(data.sizes.max())))
    count = max(1, -(-data.num_bytes // _PART_BYTES))
    starts = data.offsets[:-1].astype(np.int32)
    whole = cache(lambda: (_rows(data, 0, data.num_examples, allowed), starts))
    sizes, frozen = jax.device_put((data.sizes.astype(np.int32), model.constants))

    @jax.jit
    def sums_of(constants, examples, starts, sizes, clients, *arguments):
        with model.given(constants):
            return sums_in(examples, starts, sizes, clients, *arguments)

    def sums_in(examples, starts, sizes, clients, *arguments):
        num_rows = len(jax.tree.leaves(examples)[0])

        def each_at(index, params, i):
            rows = i * block + jnp.arange(block)
            where, is_real = starts[index] + rows, rows < sizes[index]
            batch = jax.tree.map(lambda a: a[jnp.clip(where, 0, len(a) - 1)], examples)
            each = _per_example(model, metrics, params, batch, is_real)
            # Rows beyond the client are written nowhere.
            return each, jnp.where(is_real, where, num_rows)

        def first():
            return each_at(clients[0], params_of(clients[0], *arguments), jnp.int32(0))[0]

        like = jax.eval_shape(first)
        zeros = jax.tree.map(lambda v: jnp.zeros(v.shape[1:], v.dtype), like._replace(rows={}))

        def one_client(rows, index):
            params = params_of(index, *arguments)

            def body(i, carry):
                total, rows = carry
                each, where = each_at(index, params, i)
                sums = jax.tree.map(lambda v: jnp.sum(v, axis=0), each._replace(rows={}))
                rows = jax.tree.map(lambda a, v: a.at[where].set(v, mode="drop"), rows, each.rows)
                return jax.tree.map(jnp.add, total, sums), rows

            num_blocks = -(-sizes[index] // block)
            sums, rows = jax.lax.fori_loop(0, num_blocks, body, (zeros, rows))
            return rows, sums

        empty = jax.tree.map(lambda v: jnp.zeros((num_rows, *v.shape[1:]), v.dtype), like.rows)
        rows, sums = jax.lax.scan(one_client, empty, clients)
        return sums._replace(rows=rows)

    all_clients = np.arange(data.num_clients, dtype=np.int32)

    def with_examples(clients: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[Any, Any]]]:
        if count == 1:
            yield clients, whole()
            return
        for few in np.array_split(clients, min(len(clients), count)):
            arrays, first_rows = data.slab(few)
            require_rows("data", arrays, allowed)
            yield few, (nested(arrays), first_rows)

    def evaluate(*arguments: Any) -> Evaluation:
        totals: Any = None
        of_all: dict[str, np.ndarray] = {}
        for clients, own in (
            [(all_clients, arguments)] if in_parts is None else in_parts(*arguments)
        ):
            for few, (examples, first_rows) in with_examples(clients):
                sums = sums_of(frozen, examples, first_rows, sizes, few, *own)
                sums = jax.tree.map(np.asarray, sums)
                if totals is None:
                    totals = jax.tree.map(
                        lambda s: np.zeros((data.num_clients, *s.shape[1:]), np.float32),
                        sums._replace(rows={}),
                    )
                    of_all = {
                        name: np.zeros((data.num_examples, rows.shape[1]), np.float32)
                        for name, rows in sums.rows.items()
                    }
                for name, rows in sums.rows.items():
                    for client in few:
                        here, size = first_rows[client], data.sizes[client]
                        start = data.offsets[client]
                        of_all[name][start : start + size] = rows[here : here + size]
                leaves = jax.tree.leaves(sums._replace(rows={}))
                for array, part in zip(jax.tree.leaves(totals), leaves, strict=True):
                    array[few] = part
        return _result(totals._replace(rows=of_all), data, metrics)

    return evaluate


@checked
def summarize(
    evaluation: Evaluation, quantiles: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> dict[str, float]:
    """Summarises accuracy and loss over clients, each client counting once.

    Clients without held-out examples are left out; those with a loss that is not finite are not.
    The numbers are exact and not private.

    Args:
      evaluation: results by client.
      quantiles: the quantiles of client accuracy to report, each in [0, 1].

    Returns:
      `worst_client_accuracy`, `worst_tenth_accuracy` (the mean over the worst tenth of the clients,
      rounded up), `best_client_accuracy`, `accuracy_disparity` (best minus worst),
      `mean_client_accuracy`, `std_client_accuracy`, `worst_client_loss`, and `client_accuracy_qNN`
      for each quantile; without accuracies if no client has one. Of every metric that is a number,
      `mean_client_NAME`, `worst_tenth_NAME`, and `clients_without_NAME`, the number of clients with
      examples for which it has no meaning and which the others leave out, such as those of one
      class for the AUC.

    Source: Malekmohammadi and others 2024 (RC-DPFL), section 5, for the worst accuracy and the
    disparity.
    """
    checks.probability("quantiles", quantiles, allow_zero=True)
    summary: dict[str, float] = {}
    for name, values in evaluation.client_metrics.items():
        if isinstance(values, np.ndarray):
            summary |= _of_metric(name, values, evaluation)
    losses = evaluation.client_loss[evaluation.client_sizes > 0]
    if losses.size:
        summary["worst_client_loss"] = float(losses.max())
    accuracies = evaluation.client_accuracy[np.isfinite(evaluation.client_accuracy)]
    if not accuracies.size:
        return summary
    summary |= {
        "worst_client_accuracy": float(accuracies.min()),
        "worst_tenth_accuracy": float(np.sort(accuracies)[: -(-len(accuracies) // 10)].mean()),
        "best_client_accuracy": float(accuracies.max()),
        "accuracy_disparity": float(accuracies.max() - accuracies.min()),
        "mean_client_accuracy": float(accuracies.mean()),
        "std_client_accuracy": float(accuracies.std()),
    }
    for q in quantiles:
        summary[f"client_accuracy_q{round(100 * q):02d}"] = float(np.quantile(accuracies, q))
    return summary


def _of_metric(name: str, values: np.ndarray, evaluation: Evaluation) -> dict[str, float]:
    """Summarises a metric over the clients for which it is a number."""
    known = values[~np.isnan(values)]
    is_tested = evaluation.client_sizes > 0
    summary: dict[str, float] = {}
    summary[f"clients_without_{name}"] = int(np.sum(np.isnan(values) & is_tested))
    if known.size:
        worst = np.sort(known)
        if name in evaluation.largest_is_worst:
            worst = worst[::-1]
        summary[f"mean_client_{name}"] = float(known.mean())
        summary[f"worst_tenth_{name}"] = float(worst[: -(-len(known) // 10)].mean())
    return summary


@checked
def wilson_interval(
    shares: ArrayLike, counts: ArrayLike, *, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds a success rate from the share of successes among independent trials.

    Unlike a share ± a multiple of its standard error, the interval stays within [0, 1] and has a
    width if all trials succeeded: for one success in one trial it is 0.21 to 1.

    Args:
      shares: successes over trials, in [0, 1]; NaN without trials.
      counts: the number of trials, of the same shape or one for all.
      confidence: approximate coverage, in (0, 1).

    Returns:
      Lower and upper ends; NaN without trials.

    Raises:
      ValueError: for a share outside [0, 1], a count that is negative or not a number, shapes that
        do not broadcast, or a confidence out of range.

    Source: Wilson 1927.
    """
    checks.require(0 < confidence < 1, "confidence", "be in (0, 1)", confidence)
    p, n = np.asarray(shares, np.float64), np.asarray(counts, np.float64)
    checks.require(bool(np.all(n >= 0)), "counts", "be at least 0", counts)
    is_share = np.isnan(p) | ((p >= 0) & (p <= 1))
    checks.require(bool(np.all(is_share)), "shares", "be in [0, 1] or NaN", shares)
    rule = f"be a number or of shape {p.shape}, as shares"
    checks.require(n.shape in ((), p.shape), "counts", rule, n.shape)
    square = float(scipy.special.ndtri((1 + confidence) / 2)) ** 2
    n = np.where(n > 0, n, np.nan)
    middle = (p + square / (2 * n)) / (1 + square / n)
    half = np.sqrt(square * (p * (1 - p) + square / (4 * n)) / n) / (1 + square / n)
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


class Heterogeneity(NamedTuple):
    """The mean over clients of ‖∇f_i(θ*)‖², in two published conventions.

    Attributes:
      value: as defined, with the gradient of each client's mean loss.
      doubled: 4 times that, with twice the gradient, as in the chapter's figures: its losses have a
        factor ½ that its gradients lack.
      by_client: each client's term of `value`, `[num_clients]`.
    """

    value: float
    doubled: float
    by_client: np.ndarray


@checked
def heterogeneity(
    model: Model, data: FederatedData, params: PyTree, *, block_size: Count = 1024
) -> Heterogeneity:
    """Measures heterogeneity exactly, so the result is not private.

    Args:
      model: defines the loss f_i of a client, the mean over its examples; `least_squares` with the
        clients' size as its scale makes it the sum.
      data: the clients' examples; those without any have the gradient zero.
      params: θ*, a minimiser of the mean over clients; elsewhere H measures the disagreement there.
      block_size: examples that are computed at once; bounds memory.

    Returns:
      H, 0 if one model is best for every client.

    Raises:
      ValueError: for a block without examples, a population without any, or targets that the loss
        is not for.

    Source: Malekmohammadi 2025, section 2.4.6.
    """
    checks.require(data.num_examples > 0, "data", "hold examples", data.num_examples)
    require_fitting(model, data, on_disk=True)
    examples = jax.device_put(nested({k: np.asarray(v) for k, v in data.examples.items()}))
    last = data.num_examples - 1

    @jax.jit
    def square_of(start, size):
        def of_block(i):
            rows = i * block_size + jnp.arange(block_size)
            batch = jax.tree.map(lambda a: a[jnp.clip(start + rows, 0, last)], examples)
            is_real = rows < size

            def loss(params):
                return jnp.sum(model.losses(params, batch, mask=is_real)[0])

            return jax.grad(loss)(params)

        with jax.default_matmul_precision("highest"):
            total = jax.lax.fori_loop(
                0,
                -(-size // block_size),
                lambda i, total: sums.add(total, of_block(i)),
                sums.zeros_like(jax.eval_shape(of_block, 0)),
            )
        return jnp.square(trees.l2_norm(trees.scale(sums.value(total), trees.reciprocal(size))))

    spans = zip(data.offsets[:-1], data.sizes, strict=True)
    by_client = np.array([square_of(np.int32(a), np.int32(n)) for a, n in spans], np.float64)
    value = float(by_client.mean())
    return Heterogeneity(value, 4 * value, by_client)
