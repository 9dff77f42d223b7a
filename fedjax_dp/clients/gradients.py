"""Gradient rules: from a micro-batch to a sum, and from a sum to a gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.clients.base import LocalConfig, Value
from fedjax_dp.clients.batches import augmented, size_for
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, jaxprs, products, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.devices import undivided
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.augmentation import Augmentation
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.per_example import per_example
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.mechanisms.clipping import SMALLEST_FACTOR
from fedjax_dp.privacy.mechanisms.mechanism import Mechanism


class GradientSum(NamedTuple):
    """Sums over the real examples of a micro-batch, and parameters with refreshed buffers."""

    gradient: PyTree
    loss: jax.Array
    clipped: jax.Array
    params: PyTree


class MicroBatch(Protocol):
    """Sums gradients over the real examples of a micro-batch."""

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        is_real: jax.Array,
        key: PRNGKey | None,
        config: LocalConfig | None,
        *,
        value: Value | None = None,
    ) -> GradientSum:
        """Returns the sum; `value` is of each example's loss, see `Objective`."""


# `(gradient_sum, count, config, key) -> gradient` of a step, from the sum over its batch.
Release: TypeAlias = Callable[[PyTree, jax.Array, LocalConfig, PRNGKey], PyTree]


class GradientRule(NamedTuple):
    """Turns examples into the gradient of a step.

    Attributes:
      micro_batch: `(params, batch, is_real, key, config) -> GradientSum`, see `MicroBatch`; only a
        private rule accepts an `objective`.
      release: `(gradient_sum, count, config, key) -> gradient` of the step.
      event: `(config) -> DpEvent` of one release on a given batch, or None.
      bound: `(config) -> Sensitivity` of the sum over a batch, or None.
      model: the model whose gradients these are; None if unknown.
    """

    micro_batch: MicroBatch
    release: Release
    event: Callable[[LocalConfig], Any] | None
    bound: Callable[[LocalConfig], Any] | None
    model: Model | None = None

    def augmented(self, augmentation: Augmentation) -> "GradientRule":
        """Returns the rule on the augmented records of a batch, for audits of one step.

        Args:
          augmentation: changes each record, which its place in the batch identifies.

        Returns:
          The rule; its micro-batches need a key.
        """

        def micro_batch(params, batch, is_real, key, config, *, value=None):
            rows = jnp.arange(is_real.shape[0])
            own = fold(key, Purpose.AUGMENTATION)
            is_private = self.event is not None
            batch = augmented(augmentation, batch, rows, own, is_private=is_private)
            return self.micro_batch(params, batch, is_real, key, config, value=value)

        return self._replace(micro_batch=micro_batch)


@checked
def plain(model: Model) -> GradientRule:
    """Takes the mean gradient over the real examples of a batch.

    Args:
      model: the model; its buffers, if any, are refreshed by each micro-batch.

    Returns:
      The rule, which claims no privacy.
    """

    def micro_batch(params, batch, is_real, key, config, *, value=None):
        rule = "be given only to a private rule; others apply it to the mean loss of a batch"
        checks.require(value is None, "value", rule, value)
        del config
        kinds.require_floats(params)

        def total(p):
            losses, refreshed = model.losses(p, batch, is_training=True, key=key, mask=is_real)
            return jnp.sum(jnp.where(is_real, losses, 0.0)), refreshed

        (loss, refreshed), gradient = jax.value_and_grad(total, has_aux=True)(params)
        gradient = jax.tree.map(trees.at_least_float32, gradient)
        return GradientSum(undivided(gradient), loss, jnp.float32(0), refreshed)

    def release(gradient_sum, count, config, key):
        del config, key
        return trees.scale(gradient_sum, 1 / jnp.maximum(count, 1))

    return GradientRule(micro_batch, release, None, None, model)


def mean_gradient(
    model: Model, params: PyTree, client: ClientData, batch_size: int, key: PRNGKey
) -> PyTree:
    """Computes the exact mean gradient over a client, zero without examples; not private."""
    rule, most = plain(model), min(batch_size, client.limit)
    micro = client.limit if model.mixes_examples else size_for(model, params, client, most)

    def part(i):
        rows = i * micro + jnp.arange(micro)
        batch, is_real = client.gather(rows), rows < client.size
        summed = rule.micro_batch(params, batch, is_real, jax.random.fold_in(key, i), None)
        return summed.gradient

    if micro >= client.limit:
        total = part(0)
    else:
        zeros = sums.zeros_like(jax.eval_shape(part, 0))
        passes = client.widest(-(-client.size // micro))
        total = jax.lax.fori_loop(0, passes, lambda i, t: sums.add(t, part(i)), zeros)
        total = sums.value(total)
    return trees.scale(total, 1 / jnp.maximum(client.size, 1))


@checked
def clipped(
    model: Model,
    *,
    per_layer: bool = False,
    make_mechanism: Callable[[Any, Any], Mechanism] | None = None,
) -> GradientRule:
    """Clips each example's gradient, sums, adds noise, divides by the nominal batch size.

    Guarantee: unit of privacy is one record; clip, sensitivity, noise and event come from the same
    mechanism, by default the Gaussian one with standard deviation `noise_multiplier * clip_norm`.
    The divisor is the public `batch_size`, never the realised count. An example whose gradient is
    not finite contributes zero.

    Args:
      model: the model; refused if its examples influence one another.
      per_layer: clip each layer to an equal share of `clip_norm` instead of the whole gradient.
      make_mechanism: `(clip_norm, noise_multiplier) -> Mechanism`, of traced numbers; Gaussian if
        None.

    Returns:
      The rule.

    Raises:
      ValueError: if the model mixes examples, or `per_layer` is set with a mechanism.

    Source: Abadi and others 2016, algorithm 1; Malekmohammadi 2025, equation 3.1.
    """
    checks.require(
        not model.mixes_examples,
        "model",
        "keep examples apart under per-example clipping; replace batch norm by group norm",
        model.name,
    )
    checks.require(
        make_mechanism is None or not per_layer,
        "per_layer",
        "be left to the mechanism if one is given",
        per_layer,
    )
    make = make_mechanism or partial(
        mechanisms.gaussian, method="per_layer" if per_layer else "global"
    )

    def mechanism_of(config: LocalConfig) -> Mechanism:
        return make(config.clip_norm, config.noise_multiplier)

    # Accelerators round the factors of float32 products by default; a sum would then not be that of
    # the gradients whose norms were bounded.
    @products.of_records()
    def micro_batch(params, batch, is_real, key, config, *, value=None):
        kinds.require_floats(params)
        mechanism = mechanism_of(config)
        examples = {"batch": batch, "is_real": is_real, "index": jnp.arange(is_real.shape[0])}

        def loss_of(p, example):
            single = jax.tree.map(lambda a: a[None], example["batch"])
            own_key = None if key is None else jax.random.fold_in(key, example["index"])
            mask = example["is_real"][None]
            loss = model.losses(p, single, is_training=True, key=own_key, mask=mask)[0][0]
            return loss if value is None else value(loss, p)

        if products.arithmetic().products == "split":
            _require_no_convolution(loss_of, params, examples)
        if mechanism.clips_by_leaf_norms:
            gradients = per_example(loss_of, params, examples)
            norms = gradients.norms
            clipped_norms, norm = jax.vmap(mechanism.clip)(norms)
            factors = jax.tree.map(
                lambda after, before: _factor(after, before, is_real), clipped_norms, norms
            )
            losses, summed = gradients.losses, undivided(gradients.weighted_sum(factors))
        else:
            gradient_of = jax.value_and_grad(loss_of)
            losses, each = undivided(jax.vmap(gradient_of, in_axes=(None, 0))(params, examples))
            bounded, norm = jax.vmap(mechanism.clip)(jax.tree.map(trees.at_least_float32, each))
            bounded = jax.tree.map(
                lambda g: jnp.where(is_real.reshape(-1, *[1] * (g.ndim - 1)), g, 0), bounded
            )
            summed = sums.value(sums.over_first_axis(bounded))
        was_clipped = is_real & (norm > config.clip_norm)
        return GradientSum(summed, jnp.sum(losses), jnp.sum(was_clipped, dtype=jnp.float32), params)

    def release(gradient_sum, count, config, key):
        del count
        noised = mechanism_of(config).add_noise(key, gradient_sum)
        return trees.scale(noised, 1 / config.batch_size)

    return GradientRule(
        micro_batch,
        release,
        event=lambda config: mechanism_of(config).event(),
        bound=lambda config: mechanism_of(config).sensitivity,
        model=model,
    )


def _require_no_convolution(loss_of: Callable[..., Any], params: PyTree, examples: PyTree) -> None:
    """Refuses what would be computed with less precision: JAX splits no convolution."""
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), examples)
    has_one = jaxprs.has_primitive(jax.make_jaxpr(loss_of)(params, one), "conv_general_dilated")
    rule = "be 'exact' for a model with convolutions that are not lowered (lower=False)"
    checks.require(not has_one, "products", rule, "split")


def _factor(after: jax.Array, before: jax.Array, is_real: jax.Array) -> jax.Array:
    """Computes the factor between two norms of a leaf, 0 outside the range of floats."""
    # A barely representable factor has a large relative rounding error, and might be rounded up.
    factor = after / jnp.where(before > 0, before, 1.0)
    return jnp.where(is_real & (before > 0) & (factor > SMALLEST_FACTOR), factor, 0.0)
