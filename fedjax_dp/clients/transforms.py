"""Transforms of an update before it leaves the client, applied in order."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import ClientData, PublicClient
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Form
from fedjax_dp.core.ranges import NonNegative, Positive, Probability
from fedjax_dp.core.trees import PyTree
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
      The transform. It claims nothing by itself: a claim needs a bound before it.
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
