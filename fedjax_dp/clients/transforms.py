"""Transforms of an update before it leaves the client, applied in order."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import ClientData, PublicClient
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Form
from fedjax_dp.core.ranges import Decay, NonNegative, Positive, Probability
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.mechanisms import clipping, noise


class UpdateContext(NamedTuple):
    """What an update transform may read besides the delta.

    Attributes:
      params: the local parameters at the end of training, noised if training is private.
      gradient: the gradient of the last step as it was released, noised if training is private;
        zeros if no step was taken.
      client: the client with its records; its public data alone for a transform that reads none.
      config: the client's numbers.
      key: a key of the round, the client and the transform's place in the chain.
    """

    params: PyTree
    gradient: PyTree
    client: ClientData | PublicClient
    config: LocalConfig
    key: PRNGKey


class Apply(Protocol):
    """Changes an update at the client."""

    def __call__(self, delta: PyTree, context: UpdateContext, /) -> PyTree:
        """Returns the new update."""


@dataclasses.dataclass(frozen=True)
class UpdateTransform:
    """A change of an update, and whether it reads records.

    Guarantee: a transform that declares to read no records gets none.

    Attributes:
      apply: `(delta, context) -> delta`.
      reads_records: whether `apply` reads the client's records. Local training that claims privacy
        for records then refuses it, since no event covers what it reads.
      name: its name in errors.
      instead: the alternative that an error names.
      form: `(form) -> form`, the form in which the update is sent, for counting bytes; whole and in
        its own type by default.
    """

    apply: Apply
    reads_records: bool
    name: str
    instead: str = "declare no privacy for records, or use a transform that reads none"
    form: Callable[[Form], Form] = lambda form: Form()

    def __call__(self, delta: PyTree, context: UpdateContext) -> PyTree:
        """Returns the update after the transform, which gets no records it did not declare."""
        if not self.reads_records:
            context = context._replace(client=context.client.public())
        return self.apply(delta, context)


@checked
def update_transform(
    apply: Apply | None = None, *, reads_records: bool, name: str | None = None
) -> Any:
    """Declares an update transform; a decorator too, as `@update_transform(reads_records=False)`.

    Guarantee: one that reads no records gets a client without any. A closure is not inspected: a
    function that holds records itself reads them, whatever it declares.

    Args:
      apply: `(delta, context) -> delta`, see `UpdateContext`.
      reads_records: whether it reads the client's records, `context.client.gather(...)`. The delta,
        the parameters and the gradient do not count: after private training they are noised.
      name: its name in errors; that of the function if None.

    Returns:
      The transform, an `UpdateTransform`; without `apply` a decorator.
    """
    if apply is None:
        return partial(update_transform, reads_records=reads_records, name=name)
    return UpdateTransform(apply, bool(reads_records), name or _name_of(apply))


def declared(
    argument: str, transforms: Sequence[Apply], *, is_private: bool
) -> tuple[UpdateTransform, ...]:
    """Returns transforms with declarations; refuses readers of records if `is_private`."""
    # A claim for whole clients needs nothing here: its bound and noise come after the transforms.
    for transform in transforms if is_private else ():
        checks.require(
            isinstance(transform, UpdateTransform),
            argument,
            "declare whether they read records, since privacy is claimed for these: "
            "update_transform(function, reads_records=...)",
            _name_of(transform),
        )
        assert isinstance(transform, UpdateTransform)
        checks.require(
            not transform.reads_records,
            argument,
            "read no records, since the event of private training does not cover "
            f"it; {transform.instead}",
            transform.name,
        )
    return tuple(
        t if isinstance(t, UpdateTransform) else update_transform(t, reads_records=True)
        for t in transforms
    )


def _name_of(apply: Any) -> str:
    return str(getattr(apply, "__name__", repr(apply)))


def _reads_none(
    name: str, apply: Apply, form: Callable[[Form], Form] = lambda form: Form()
) -> UpdateTransform:
    return UpdateTransform(apply, False, name, form=form)


@checked
def clip_update(clip_norm: Positive) -> UpdateTransform:
    """Scales an update down to a bound on its L2 norm.

    Args:
      clip_norm: the bound, above 0.

    Returns:
      The transform; an update that is not finite becomes zero.
    """
    return _reads_none(
        "clip_update",
        lambda delta, context: clipping.clip_by_global_norm(delta, clip_norm)[0],
        lambda form: form.of_type(None),
    )


@checked
def add_client_noise(stddev: NonNegative) -> UpdateTransform:
    """Adds Gaussian noise at the client.

    Args:
      stddev: standard deviation in parameter units, at least 0.

    Returns:
      The transform. It claims nothing by itself, since a claim needs a bound before it.
    """
    return _reads_none(
        "add_client_noise",
        lambda delta, context: noise.add_gaussian(context.key, delta, stddev),
    )


@checked
def keep_largest(share: Probability) -> UpdateTransform:
    """Keeps the entries of largest magnitude in every layer and zeroes the others.

    Args:
      share: the share of entries to keep in each layer, in (0, 1]; at least one is kept, and ties
        are broken by position, so that exactly that many remain.

    Returns:
      The transform.
    """

    def sparsify(x: jax.Array) -> jax.Array:
        return jnp.where(mask_of_largest(jnp.abs(x), share), x, 0)

    return _reads_none(
        "keep_largest", lambda delta, context: jax.tree.map(sparsify, delta), Form.sparse
    )


def mask_of_largest(scores: jax.Array, share: float) -> jax.Array:
    """Marks exactly `max(1, round(share * size))` entries of largest score, ties by position."""
    flat = jnp.where(jnp.isnan(scores), -jnp.inf, scores).reshape(-1)
    count = max(1, round(share * flat.size))
    least = _kth_largest(flat, count)
    above, tied = flat > least, flat == least
    # Positions from the end, so that the first of those that tie are the largest.
    position = jnp.where(tied, jnp.uint32(flat.size) - jnp.arange(flat.size, dtype=jnp.uint32), 0)
    last = _kth_largest_whole(position, count - jnp.sum(above), flat.size.bit_length())
    return (above | (tied & (position >= last))).reshape(scores.shape)


def _kth_largest(values: jax.Array, count: int) -> jax.Array:
    """Finds the `count`-th largest number, which is many times as fast as sorting."""
    real = jnp.promote_types(values.dtype, jnp.float32)
    whole = jnp.uint64 if real == jnp.float64 else jnp.uint32
    num_bits = jnp.iinfo(whole).bits
    sign = jnp.asarray(1 << (num_bits - 1), whole)
    bits = jax.lax.bitcast_convert_type(values.astype(real), whole)
    # Integers in the order of the numbers; the bits of negative numbers count backwards.
    least = _kth_largest_whole(jnp.where(bits >= sign, ~bits, bits | sign), count, num_bits)
    return jax.lax.bitcast_convert_type(jnp.where(least >= sign, least ^ sign, ~least), real)


def _kth_largest_whole(values: jax.Array, count: jax.typing.ArrayLike, num_bits: int) -> jax.Array:
    """Finds the `count`-th largest of unsigned integers of `num_bits` bits, bit by bit."""
    one = jnp.ones((), values.dtype)

    def set_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        larger = least | (one << jnp.asarray(num_bits - 1 - i, values.dtype))
        return jnp.where(jnp.sum(values >= larger) >= count, larger, least)

    return jax.lax.fori_loop(0, num_bits, set_bit, jnp.zeros((), values.dtype))


def cast(dtype: jax.typing.DTypeLike) -> UpdateTransform:
    """Rounds an update to a narrower type, to save bandwidth.

    Args:
      dtype: the type that is sent, such as `jnp.bfloat16`; the result keeps its own type.

    Returns:
      The transform.
    """

    def rounded(delta, context):
        return jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), delta)

    name = jnp.dtype(dtype).name
    return _reads_none("cast", rounded, lambda form: form.of_type(name))


@checked
def scale_update(factor: float) -> UpdateTransform:
    """Multiplies an update by one number.

    Args:
      factor: the number.

    Returns:
      The transform.
    """
    return _reads_none(
        "scale_update",
        lambda delta, context: trees.scale(delta, factor),
        lambda form: form.of_type(None),
    )


Score = Literal["cost", "cost_of_last_step", "magnitude"]
SCORES = get_args(Score)


@checked
def sparsify(model: Model, sparsity: Decay, *, score: Score = "cost") -> UpdateTransform:
    """Zeroes the entries of an update that matter least to the client: LUS.

    The cost of an entry is `|∂f/∂w · Δw|`, what undoing it would change in the client's own loss,
    to first order. In every layer (each parameter tensor) the costliest entries stay.

    The choice is never sent: noise must be on all entries. "cost" reads records, so that training
    which is private for records refuses it; the two others are post-processing of what was
    released.

    Args:
      model: the model; buffers, such as batch-norm statistics, are left as they are.
      sparsity: c, the share of entries to drop in each layer, in [0, 1); at least one stays. 0
        leaves the update as it is.
      score: "cost" takes the gradient of the mean loss over all of the client's data at its final
        model, "cost_of_last_step" the gradient of the last local step, which was taken just before
        that model, and "magnitude" ignores gradients.

    Returns:
      The transform. It keeps exactly `max(1, round((1 − c) · size))` entries of each layer; ties by
      index.

    Raises:
      ValueError: for a number or a name that is out of range.

    Source: Cheng and others 2022 (LUS), section 4.2, equations 11 to 13.
    """
    declaration = declared_sparsification(sparsity, score)
    share = 1 - sparsity

    def scores_of(delta, context):
        if score == "magnitude":
            return jax.tree.map(jnp.abs, delta)
        gradient = context.gradient
        if score == "cost":
            gradient = mean_gradient(model, context.params, context.client)
        return jax.tree.map(lambda g, d: jnp.abs(g * d), gradient, delta)

    def keep(delta, context):
        if sparsity == 0:
            return delta

        def kept(d, s, is_buffer):
            return d if is_buffer else jnp.where(mask_of_largest(s, share), d, 0)

        return jax.tree.map(kept, delta, scores_of(delta, context), model.is_buffer(delta))

    return dataclasses.replace(declaration, apply=keep)


@checked
def declared_sparsification(sparsity: Decay, score: Score) -> UpdateTransform:
    """Returns the declaration of `sparsify`, before there is a model to build it for."""
    return UpdateTransform(
        lambda delta, context: delta,
        reads_records=score == "cost" and sparsity > 0,
        name=f"sparsify with score {score!r}",
        instead="the scores 'cost_of_last_step' and 'magnitude' read none",
        form=Form.sparse if sparsity > 0 else lambda form: form,
    )


def mean_gradient(
    model: Model, params: PyTree, client: ClientData, *, block_size: int = 128
) -> PyTree:
    """Computes the gradient of a client's mean loss, without dropout; not private."""
    block = min(block_size, client.limit)

    def body(i, total):
        rows = i * block + jnp.arange(block)
        is_real = rows < client.size
        batch = client.gather(rows)

        def loss(p):
            return jnp.sum(model.losses(p, batch, mask=is_real)[0])

        return trees.add(total, jax.tree.map(trees.at_least_float32, jax.grad(loss)(params)))

    zeros = jax.tree.map(lambda p: trees.at_least_float32(jnp.zeros_like(p)), params)
    num_blocks = client.widest(-(-client.size // block))
    total = jax.lax.fori_loop(0, num_blocks, body, zeros)
    return trees.scale(total, 1 / jnp.maximum(client.size, 1))
