"""What a client does to its update before it leaves: functions that are applied in order."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

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
    """What an update transform may look at besides the delta.

    Attributes:
      params: the local parameters at the end of training, noised where training is private.
      gradient: the gradient of the last step as it was released, noised where training is private;
        zeros where no step was taken.
      client: the client with its records; what is public of it for a transform that reads none.
      config: the client's numbers.
      key: a key of the round, the client and the transform's place in the chain.
    """

    params: PyTree
    gradient: PyTree
    client: ClientData | PublicClient
    config: LocalConfig
    key: PRNGKey


Apply: TypeAlias = Callable[[PyTree, UpdateContext], PyTree]


@dataclasses.dataclass(frozen=True)
class UpdateTransform:
    """What is done to an update, and whether records are read for it.

    Guarantee: a transform that says it reads no records is never handed any.

    Attributes:
      apply: `(delta, context) -> delta`.
      reads_records: whether `apply` looks at the client's records. Local training that claims
        privacy for records refuses it then, since no event covers what it reads.
      name: what a refusal calls it.
      instead: what to take where it is refused, in words.
      form: `(form) -> form`, in which form the update is sent behind it, for whoever counts bytes;
        whole and in its own type where nothing else is said.
    """

    apply: Apply
    reads_records: bool
    name: str
    instead: str = "declare no privacy for records, or take what reads none"
    form: Callable[[Form], Form] = lambda form: Form()

    def __call__(self, delta: PyTree, context: UpdateContext) -> PyTree:
        """Transforms an update.

        Args:
          delta: the update.
          context: what may be looked at besides.

        Returns:
          What becomes of it.
        """
        if not self.reads_records:
            context = context._replace(client=context.client.public())
        return self.apply(delta, context)


@checked
def update_transform(
    apply: Apply | None = None, *, reads_records: bool, name: str | None = None
) -> Any:
    """Declares an update transform; a decorator too, as `@update_transform(reads_records=False)`.

    Guarantee: one that reads no records is handed a client without any. What a closure holds cannot
    be seen: a function that carries records along reads them, whatever it declares.

    Args:
      apply: `(delta, context) -> delta`, see `UpdateContext`.
      reads_records: whether it looks at the client's records, `context.client.gather(...)`. The
        delta, the parameters and the gradient count as none: behind private training they are
        noised.
      name: what a refusal calls it; the function's own name where it is None.

    Returns:
      The transform, an `UpdateTransform`; without `apply` what makes one of a function.
    """
    if apply is None:
        return partial(update_transform, reads_records=reads_records, name=name)
    return UpdateTransform(apply, bool(reads_records), name or _name_of(apply))


def declared(
    argument: str, transforms: Sequence[Apply], *, is_private: bool
) -> tuple[UpdateTransform, ...]:
    """Requires that update transforms leave a claim for records true.

    Args:
      argument: the name to put into the error.
      transforms: in order; functions without a declaration count as readers where nothing is
        claimed.
      is_private: whether privacy is claimed for records. A claim for whole clients needs nothing
        here: its bound and its noise come behind the transforms.

    Returns:
      The transforms, each with a declaration.

    Raises:
      ValueError: if privacy is claimed and a transform reads records, or does not say.
    """
    for transform in transforms if is_private else ():
        checks.require(
            isinstance(transform, UpdateTransform),
            argument,
            "say whether they read records, where privacy is claimed for these: "
            "update_transform(function, reads_records=...)",
            _name_of(transform),
        )
        assert isinstance(transform, UpdateTransform)
        checks.require(
            not transform.reads_records,
            argument,
            "read no records behind the noise of private training, whose event does not cover "
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
    """Marks the entries of largest score.

    Args:
      scores: any shape; NaN counts as the least.
      share: the share of entries to mark, in (0, 1]; at least one is.

    Returns:
      Bools of the same shape, exactly `max(1, round(share * size))` of them true; of equal scores
      the first in order.
    """
    flat = jnp.where(jnp.isnan(scores), -jnp.inf, scores).reshape(-1)
    count = max(1, round(share * flat.size))
    least = jax.lax.top_k(flat, count)[0][-1]
    above, tied = flat > least, flat == least
    room = count - jnp.sum(above)
    return (above | (tied & (jnp.cumsum(tied) <= room))).reshape(scores.shape)


def cast(dtype: jax.typing.DTypeLike) -> UpdateTransform:
    """Rounds an update to a narrower type, as a client with little bandwidth would send it.

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
