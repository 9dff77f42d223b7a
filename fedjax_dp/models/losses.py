"""Losses per example, the targets that they are for, and the counts for accuracy."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.backend import traced_with
from fedjax_dp.core.trees import PyTree

Batch = Mapping[str, Any]
Targets = Literal["classes", "ordered", "probabilities", "numbers", "counts"]
IGNORE_LABEL = -1
# The closest that two cumulative log-odds are taken to be; closer or crossing ones count as so far.
_SMALLEST_GAP = 1e-6


class LossFn(Protocol):
    """A loss for each example."""

    def __call__(self, outputs: PyTree, batch: Batch, /) -> jax.Array:
        """Computes the losses, `[examples]`."""
        ...


class CorrectFn(Protocol):
    """The counts for accuracy."""

    def __call__(self, outputs: PyTree, batch: Batch, /) -> tuple[jax.Array, jax.Array]:
        """Computes correct answers and their weights, each `[examples]`."""
        ...


@checked
def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy of integer labels, averaged over the tokens of each example.

    A label outside [0, classes), such as `IGNORE_LABEL`, is left out of the mean; an example with
    no valid label has loss 0 and gradient 0.

    Args:
      logits: unnormalised log-probabilities, `[examples, ..., classes]`.
      labels: integer classes, `[examples, ...]`.

    Returns:
      Losses in nats, `[examples]`, float32 or better.
    """
    logits, valid = _widen(logits), _is_class(logits, labels)
    _listed("classes", logits, labels)
    safe = jnp.where(valid, _whole(labels), 0)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
    return _mean_where(values, valid)


@checked
def softmax_correct(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measures the share of an example's valid labels that have the largest logit.

    Args:
      logits: unnormalised log-probabilities, `[examples, ..., classes]`.
      labels: integer classes, `[examples, ...]`; values outside [0, classes) are left out.

    Returns:
      The share of correct labels times the weight, `[examples]`, and the weight, `[examples]`. The
      weight is 1 if an example has a valid label, else 0. The sum of the first over the sum of the
      second is the accuracy.
    """
    valid = _is_class(logits, labels)
    is_known = ~jnp.isnan(jnp.max(logits, axis=-1))
    hits = (is_known & (jnp.argmax(logits, axis=-1) == _whole(labels))).astype(jnp.float32)
    return _mean_where(hits, valid), _any_valid(valid)


@checked
def sigmoid_binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy of yes-or-no labels, averaged over the labels of each example.

    Args:
      logits: log-odds of label 1, `[examples, ...]`; a last axis of size 1 that the labels lack is
        dropped.
      labels: values in [0, 1], `[examples, ...]`; others, such as `IGNORE_LABEL`, are left out of
        the mean.

    Returns:
      Losses in nats, `[examples]`, float32 or better; 0 for an example with no valid label.
    """
    logits, valid = _same_rank(_widen(logits), labels), _is_probability(labels)
    _listed("probabilities", logits, labels)
    targets = jnp.where(valid, labels.astype(logits.dtype), 0)
    return _mean_where(optax.sigmoid_binary_cross_entropy(logits, targets), valid)


@checked
def sigmoid_half_squared_error(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes half the squared error of probabilities, averaged over the labels of each example.

    The gradient of `½(y − σ(z))²` is `(σ(z) − y)·σ(z)(1 − σ(z))`, at most 4/27 in absolute value:
    it vanishes for confident predictions, right or wrong, and the loss is not convex.

    Args:
      logits: log-odds of label 1, `[examples, ...]`; a last axis of size 1 that the labels lack is
        dropped.
      labels: values in [0, 1], `[examples, ...]`; others, such as `IGNORE_LABEL`, are left out of
        the mean.

    Returns:
      Losses in [0, 1/2], `[examples]`, float32 or better; 0 for an example with no valid label.

    Source: Mugunthan 2022, section 2.5, whose figures follow from training with this loss.
    """
    logits, valid = _same_rank(_widen(logits), labels), _is_probability(labels)
    _listed("probabilities", logits, labels)
    targets = jnp.where(valid, labels.astype(logits.dtype), 0)
    return _mean_where(jnp.square(targets - jax.nn.sigmoid(logits)) / 2, valid)


@checked
def sigmoid_correct(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measures the share of an example's valid yes-or-no labels on the right side of log-odds 0.

    Args:
      logits: log-odds of label 1, `[examples, ...]`; 0 counts as label 0.
      labels: values in [0, 1], `[examples, ...]`, read as label 1 above one half; others are left
        out.

    Returns:
      The share of correct labels times the weight and the weight, as `softmax_correct` does.
    """
    logits = _same_rank(logits, labels)
    valid = _is_probability(labels)
    hits = (~jnp.isnan(logits) & ((logits > 0) == (labels.astype(jnp.float32) > 0.5))).astype(
        jnp.float32
    )
    return _mean_where(hits, valid), _any_valid(valid)


@checked
def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the squared error, without a factor one half, averaged over each example's targets.

    Args:
      outputs: predictions, `[examples, ...]`; a last axis of size 1 that the targets lack is
        dropped.
      targets: real values, `[examples, ...]`.

    Returns:
      Losses, `[examples]`, float32 or better.
    """
    outputs = _same_rank(_widen(outputs), targets)
    _listed("numbers", outputs, targets)
    squares = jnp.square(outputs - targets.astype(outputs.dtype))
    return jnp.mean(squares.reshape(squares.shape[0], -1), axis=1)


@checked
def half_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes half the squared error, summed over each example's targets.

    Args:
      outputs: predictions, `[examples, ...]`; a last axis of size 1 that the targets lack is
        dropped.
      targets: real values, `[examples, ...]`.

    Returns:
      Losses, `[examples]`, float32 or better.
    """
    outputs = _same_rank(_widen(outputs), targets)
    _listed("numbers", outputs, targets)
    squares = jnp.square(outputs - targets.astype(outputs.dtype))
    return jnp.sum(squares.reshape(squares.shape[0], -1), axis=1) / 2


@checked
def ordinal_cross_entropy(log_odds: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy of ordered classes from the log-odds of lying above each.

    With log-odds `z_k = logit P(y > k)` the chance of class k is `σ(z_{k−1}) − σ(z_k)`, computed
    as `σ(z_{k−1}) σ(−z_k) (1 − exp(z_k − z_{k−1}))`, which does not cancel.

    Args:
      log_odds: one less than there are classes, in descending order, `[examples, classes - 1]`;
        neighbours that are not are read as 1e-6 apart.
      labels: integer classes from 0, in their order, `[examples]`; others, such as `IGNORE_LABEL`,
        are left out.

    Returns:
      Losses in nats, `[examples]`, float32 or better; 0 for a label that is left out.

    Source: McCullagh 1980, proportional odds where the log-odds differ by constants.
    """
    valid = _is_ordered(log_odds, labels)
    _listed("ordered", log_odds, labels)
    safe = jnp.where(valid, _whole(labels), 0)
    chances = ordered_log_chances(log_odds)
    return jnp.where(valid, -jnp.take_along_axis(chances, safe[:, None], axis=-1)[:, 0], 0)


def ordered_log_chances(log_odds: jax.Array) -> jax.Array:
    """Computes the log-chance of each class, `[..., classes]`, from log-odds of lying above."""
    z = _widen(log_odds)
    gap = jnp.maximum(z[..., :-1] - z[..., 1:], _SMALLEST_GAP)
    # Each form where it is exact: near 0 and far from it.
    is_near = gap < np.log(2)
    near = jnp.log(-jnp.expm1(-jnp.where(is_near, gap, 1)))
    far = jnp.log1p(-jnp.exp(-jnp.where(is_near, 1, gap)))
    between = jax.nn.log_sigmoid(z[..., :-1]) + jax.nn.log_sigmoid(-z[..., 1:])
    between += jnp.where(is_near, near, far)
    first, last = jax.nn.log_sigmoid(-z[..., :1]), jax.nn.log_sigmoid(z[..., -1:])
    return jnp.concatenate([first, between, last], axis=-1)


@checked
def ordinal_correct(log_odds: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measures whether the most probable of ordered classes is the label.

    Args:
      log_odds: those of lying above each class but the last, `[examples, classes - 1]`.
      labels: integer classes, `[examples]`; values outside [0, classes) are left out.

    Returns:
      Correct answers and their weights, as `softmax_correct` does.
    """
    return softmax_correct(ordered_log_chances(log_odds), labels)


@checked
def poisson_nll(log_means: jax.Array, counts: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of Poisson counts, averaged over those of each example.

    It is `exp(f) − y f`, without the constant `ln y!`; it is not finite for f above 88.

    Args:
      log_means: logarithms f of the means, `[examples, ...]`; a last axis of size 1 that the counts
        lack is dropped.
      counts: whole numbers y of at least 0, `[examples, ...]`.

    Returns:
      Losses in nats, `[examples]`, float32 or better; negative values occur.

    Source: McCullagh and Nelder 1989, chapter 6, with the logarithm as link.
    """
    log_means = _same_rank(_widen(log_means), counts)
    _listed("counts", log_means, counts)
    values = jnp.exp(log_means) - counts.astype(log_means.dtype) * log_means
    return jnp.mean(_rows(values), axis=1)


class _Named(NamedTuple):
    """A loss of the package: its values, its counts for accuracy, and its targets."""

    values: Callable[..., jax.Array]
    counts: Callable[..., Any] | None
    targets: Targets


_NAMED = {
    "softmax_cross_entropy": _Named(softmax_cross_entropy, softmax_correct, "classes"),
    "sigmoid_binary_cross_entropy": _Named(
        sigmoid_binary_cross_entropy, sigmoid_correct, "probabilities"
    ),
    "sigmoid_half_squared_error": _Named(
        sigmoid_half_squared_error, sigmoid_correct, "probabilities"
    ),
    "squared_error": _Named(squared_error, None, "numbers"),
    "half_squared_error": _Named(half_squared_error, None, "numbers"),
    "ordinal_cross_entropy": _Named(ordinal_cross_entropy, ordinal_correct, "ordered"),
    "poisson_nll": _Named(poisson_nll, None, "counts"),
}
NAMES = tuple(_NAMED)
# How accuracy is counted for a function that declares its targets.
_COUNTS: dict[Targets, Callable[..., Any]] = {
    "classes": softmax_correct,
    "ordered": ordinal_correct,
    "probabilities": sigmoid_correct,
}
# Arrays of numbers that are no labels: those that are right, and the rule in words.
_NUMBERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "numbers": (np.isfinite, "finite numbers (leave out examples without a target)"),
    "counts": (
        lambda x: np.isfinite(x) & (x >= 0) & (np.floor(x) == x),
        "counts, which are whole numbers of at least 0",
    ),
    "weights": (lambda x: np.isfinite(x) & (x >= 0), "finite weights of at least 0"),
}


class Allowed(NamedTuple):
    """The values in one array of the examples, such as the targets "y", that a loss is for.

    Classes from 0 to `num_classes` - 1; None for probabilities in [0, 1], or the `numbers` that are
    named. What has the `ignore_label` is left out, as the loss declares or by default.
    """

    name: str
    num_classes: int | None
    ignore_label: int | None
    is_declared: bool = True
    numbers: Literal["", "numbers", "counts", "weights"] = ""
    is_ordered: bool = False

    def wrong(self, targets: Any) -> np.ndarray:
        """Marks other targets, of the shape of `targets`; NaN is one."""
        targets = np.asarray(targets)
        if self.numbers:
            return ~_NUMBERS[self.numbers][0](targets)
        most = 1 if self.num_classes is None else self.num_classes - 1
        # Two passes without a copy, where all is well.
        if not targets.size or (targets.min() >= 0 and targets.max() <= most):
            return np.zeros(targets.shape, bool)
        is_wrong = ~((targets >= 0) & (targets <= most))
        return is_wrong if self.ignore_label is None else is_wrong & (targets != self.ignore_label)

    @property
    def rule(self) -> str:
        """The rule in words, for an error."""
        if self.numbers:
            return f"hold {_NUMBERS[self.numbers][1]}"
        if self.num_classes is None:
            return "hold labels 0 and 1, or numbers between them"
        of_classes = f"classes from 0 to {self.num_classes - 1}"
        what = "ordered classes" if self.is_ordered else "outputs"
        return f"hold {of_classes}, as the model has {self.num_classes} {what}"


class _Call(NamedTuple):
    """A call of a loss while its targets are listed."""

    loss: "Loss"
    batch: Batch
    found: list[Allowed]


_FOUND: contextvars.ContextVar[list[Allowed] | None] = contextvars.ContextVar("found", default=None)
_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def reads() -> Iterator[list[Allowed]]:
    """Lists the targets that losses are for, whose functions are traced in the context.

    Those of a loss of a user are known where they are declared, or where an array of the batch is
    given to a loss of this module as it is.
    """
    allowed: list[Allowed] = []
    with traced_with(_FOUND, allowed):
        yield allowed


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss that declares its targets, to give as `loss` of a model.

    Attributes:
      values: a name from `NAMES`, or `(outputs, batch) -> losses [examples]`.
      targets: what the targets `y` are: "classes", integers from 0, for logits of each class on
        the last axis of the outputs; "ordered", the same for the log-odds of lying above each class
        but the last; "probabilities", numbers in [0, 1] for log-odds of the same shape; "numbers";
        or "counts", whole numbers of at least 0 for logarithms of their means. Those of a named
        loss are known; None of a function: nothing is known, so that targets are not checked, and
        metrics that need classes rely on shapes alone.
      ignore_label: a target that means none: a padded token, or an example without a label. A named
        loss and metrics leave it out; a function has to do so itself. None allows no such target,
        except `IGNORE_LABEL` in sequences of classes, with a warning.

    Example:
      `Loss("softmax_cross_entropy", ignore_label=-100)`, or `Loss(focal_loss, "classes")`.
    """

    values: str | LossFn
    targets: Targets | None = None
    ignore_label: int | None = None

    def __post_init__(self) -> None:
        """Checks the declaration, and fills in the targets of a named loss."""
        if self.targets is not None:
            checks.one_of("targets", self.targets, get_args(Targets))
        if not callable(self.values):
            checks.one_of("loss", self.values, NAMES)
            own = _NAMED[self.values].targets
            rule = f"be left out or be {own!r} for {self.values}"
            checks.require(self.targets in (None, own), "targets", rule, self.targets)
            object.__setattr__(self, "targets", own)
        if self.ignore_label is not None:
            checks.whole("ignore_label", self.ignore_label, at_least=-checks.COUNT_LIMIT)
            rule = "be left out for targets that are no classes or probabilities"
            is_label = self.targets in _COUNTS
            checks.require(is_label, "ignore_label", rule, self.ignore_label)

    @property
    def name(self) -> str:
        """The name for errors."""
        if isinstance(self.values, str):
            return self.values
        return getattr(self.values, "__name__", type(self.values).__name__)

    def __call__(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """Computes the losses, `[examples]`."""
        if isinstance(self.values, str):
            batch = self.marked(batch)
            with self._listed(outputs, batch):
                return _NAMED[self.values].values(outputs, targets_of(batch))
        with self._listed(outputs, batch):
            values = self.values(outputs, batch)
        _require_by_example("the result of loss", values, batch)
        return values

    def correct(self, outputs: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Counts for accuracy, if the targets are classes or probabilities.

        Args:
          outputs: the model's outputs, `[examples, ...]`.
          batch: named arrays, of which "y" are the targets.

        Returns:
          Correct answers and their weights, each `[examples]`.
        """
        counts = _COUNTS[self.targets]  # type: ignore[index]
        return counts(outputs, targets_of(self.marked(batch)))

    def decoded(self, outputs: PyTree) -> PyTree:
        """Converts outputs to what metrics and predictions read.

        Args:
          outputs: the model's outputs, `[examples, ...]`.

        Returns:
          Logarithms of the chances of ordered classes, `[examples, classes]`; means of counts; any
          other outputs as they are.
        """
        if self.targets == "ordered":
            return ordered_log_chances(outputs)
        return jnp.exp(outputs) if self.targets == "counts" else outputs

    def marked(self, batch: Batch) -> Batch:
        """Replaces the label to leave out by one that is out of range.

        Args:
          batch: named arrays, of which "y" are the targets.

        Returns:
          The batch, for what leaves out such labels.
        """
        if self.ignore_label is None or self.ignore_label < 0:
            return batch
        y = jnp.asarray(targets_of(batch))
        kind = jnp.promote_types(y.dtype, jnp.int8)
        return {**batch, "y": jnp.where(y == self.ignore_label, IGNORE_LABEL, y.astype(kind))}

    @contextlib.contextmanager
    def _listed(self, outputs: PyTree, batch: Batch) -> Iterator[None]:
        """Lists the targets that are read in the context, inside `reads`."""
        found = _FOUND.get()
        if found is None:
            yield
            return
        if callable(self.values) and self.targets is not None:
            found.append(self._allowed("y", outputs, targets_of(batch), self.targets))
        with traced_with(_CALL, _Call(self, batch, found)):
            yield

    def _allowed(self, name: str, outputs: Any, labels: Any, targets: Targets) -> Allowed:
        """Describes the targets in an array, from shapes."""
        if targets in ("numbers", "counts"):
            return Allowed(name, None, None, numbers=targets)
        if targets == "ordered":
            _is_ordered(outputs, labels)
            return Allowed(name, outputs.shape[-1] + 1, self.ignore_label, is_ordered=True)
        if targets == "probabilities":
            _same_rank(outputs, labels)
            return Allowed(name, None, self.ignore_label)
        _is_class(outputs, labels)
        if self.ignore_label is None and jnp.ndim(labels) > 1:
            return Allowed(name, outputs.shape[-1], IGNORE_LABEL, is_declared=False)
        return Allowed(name, outputs.shape[-1], self.ignore_label)


def listed(allowed: Allowed) -> None:
    """Lists what another array than the targets may hold, inside `reads`."""
    found = _FOUND.get()
    if found is not None:
        found.append(allowed)


# The loss of a sequence of tokens, some of which may be padding.
TOKENS = Loss("softmax_cross_entropy", ignore_label=IGNORE_LABEL)


def _listed(targets: Targets, outputs: jax.Array, labels: jax.Array) -> None:
    """Lists an array of the batch that a loss is given as its targets, inside `reads`."""
    call = _CALL.get()
    if call is None or (callable(call.loss.values) and call.loss.targets is not None):
        return
    names = zip(trees.paths(call.batch), jax.tree.leaves(call.batch), strict=True)
    found = [name for name, leaf in names if leaf is labels]
    if found:
        call.found.append(call.loss._allowed(found[0], outputs, labels, targets))


def resolve(
    loss: str | LossFn, correct_fn: CorrectFn | None = None
) -> tuple[LossFn, CorrectFn | None]:
    """Returns the loss function and the counting function, None if accuracy has no meaning."""
    known = loss if isinstance(loss, Loss) else Loss(loss)
    if correct_fn is not None:
        return known, _checked_counts(correct_fn)
    return known, known.correct if known.targets in _COUNTS else None


def targets_of(batch: Batch) -> jax.Array:
    """Reads the targets `y` of a batch."""
    checks.require("y" in batch, "examples", "hold targets 'y' for the loss to read", sorted(batch))
    return batch["y"]


def _checked_counts(correct_fn: CorrectFn) -> CorrectFn:
    def checked(outputs: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        counts = correct_fn(outputs, batch)
        is_pair = isinstance(counts, tuple | list) and len(counts) == 2
        rule = "be two arrays, correct answers and their weights"
        checks.require(is_pair, "the result of correct_fn", rule, _kind_of(counts))
        correct, weight = counts
        _require_by_example("the first result of correct_fn", correct, batch)
        _require_by_example("the second result of correct_fn", weight, batch)
        return correct, weight

    return checked


def _require_by_example(what: str, values: jax.Array, batch: Batch) -> None:
    """Requires one real number for each example: another shape would broadcast silently."""
    count = jnp.shape(jax.tree.leaves(batch)[0])[0]
    rule = f"be one real number for each example, [{count}]"
    is_array = isinstance(values, jax.Array | np.ndarray | np.generic | float | int)
    several = f"{rule}, and nothing beside them"
    checks.require(is_array, what, several, _kind_of(values))
    kind = jnp.result_type(values)
    fits = jnp.shape(values) == (count,) and not jnp.issubdtype(kind, jnp.complexfloating)
    checks.require(fits, what, rule, f"{kind}{list(jnp.shape(values))}")


def _kind_of(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"a {type(value).__name__}{size}"


def _widen(x: jax.Array) -> jax.Array:
    return trees.at_least_float32(jnp.asarray(x))


def _same_rank(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    checks.require(
        outputs.shape == targets.shape, "targets", f"have shape {outputs.shape}", targets.shape
    )
    return outputs


def _is_class(logits: jax.Array, labels: jax.Array) -> jax.Array:
    rule = f"have shape {logits.shape[:-1]}{classes_from(labels, logits)}"
    checks.require(labels.shape == logits.shape[:-1], "labels", rule, labels.shape)
    rule = "have 2 classes or more on the last axis (for one log-odds use a sigmoid loss)"
    checks.require(logits.shape[-1] > 1, "logits", rule, logits.shape)
    is_whole = labels.dtype == bool or jnp.issubdtype(labels.dtype, jnp.integer)
    rule = "be integers or Booleans, which name classes (np.unique numbers other values)"
    checks.require(is_whole, "labels", rule, labels.dtype)
    labels = _whole(labels)
    return (labels >= 0) & (labels < logits.shape[-1])


def classes_from(labels: Any, logits: Any) -> str:
    """Says how labels of a further axis become classes, or nothing."""
    if labels.ndim != logits.ndim:
        return ""
    if labels.shape[-1] == 1:
        return " (y[..., 0] drops the last axis)"
    return (
        " (y.argmax(-1) makes classes of one-hot labels; soft labels need a loss for them, such as "
        "optax.softmax_cross_entropy of the outputs and y)"
    )


def _is_probability(labels: jax.Array) -> jax.Array:
    labels = labels.astype(jnp.float32)
    return (labels >= 0) & (labels <= 1)


def _is_ordered(log_odds: jax.Array, labels: jax.Array) -> jax.Array:
    rule = "be [examples, classes - 1] with one label for each example, as of ordered classes"
    fits = log_odds.ndim == 2 and labels.shape == log_odds.shape[:1]
    checks.require(fits, "log-odds", rule, f"{log_odds.shape} for {labels.shape}")
    is_whole = labels.dtype == bool or jnp.issubdtype(labels.dtype, jnp.integer)
    checks.require(is_whole, "labels", "be integers, the places of classes", labels.dtype)
    labels = _whole(labels)
    return (labels >= 0) & (labels <= log_odds.shape[-1])


def _whole(labels: jax.Array) -> jax.Array:
    """Reads Booleans as 0 and 1."""
    return labels.astype(jnp.int32) if labels.dtype == bool else labels


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _mean_where(values: jax.Array, valid: jax.Array) -> jax.Array:
    total = jnp.sum(_rows(jnp.where(valid, values, 0)), axis=1)
    count = jnp.maximum(jnp.sum(_rows(valid), axis=1), 1)
    return total / count.astype(total.dtype)


def _any_valid(valid: jax.Array) -> jax.Array:
    return jnp.any(_rows(valid), axis=1).astype(jnp.float32)
