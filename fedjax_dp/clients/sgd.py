"""Local training by any Optax optimiser, any sampler and any gradient rule."""

from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import optax

from fedjax_dp.clients import gradients
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.optimizers import Optimizer, ranges_of, warn_of_schedules
from fedjax_dp.clients.training_loop import TrainingLoop, first_of
from fedjax_dp.clients.transforms import Apply, declared
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.data import sampling
from fedjax_dp.data.augmentation import Augmentation
from fedjax_dp.models.base import Model

# The expected share of padding of clients with random batches, computed one by one.
_PADDING = 0.15


@checked
def local_trainer(
    model: Model,
    config: LocalConfig,
    *,
    optimizer: Optimizer = optax.sgd,
    sampler: sampling.Sampler | None = None,
    gradient_rule: gradients.GradientRule | None = None,
    micro_batch_size: int | None = None,
    update_transforms: Sequence[Apply] = (),
    augmentation: Augmentation | None = None,
) -> LocalTrainer:
    """Builds one client's training loop.

    A step draws a batch, sums the gradient rule over micro-batches, releases the gradient and takes
    an optimiser step. Both loops stop where the client's own work ends, so that clients with few
    steps or small batches do not pay for others unless they are vmapped together.

    Args:
      model: the model to train.
      config: the numbers of training, scalars or `[num_clients]`.
      optimizer: an Optax factory that takes the (traced) learning rate and, by name, the numbers of
        `config.optimizer`, such as `optax.sgd`; or a ready transformation, which then ignores both.
      sampler: how a step's batch is drawn; shuffled epochs if None.
      gradient_rule: `gradients.plain(model)` if None, or `gradients.clipped(model)`.
      micro_batch_size: examples that are computed at once; it bounds memory and changes nothing
        else, except the draws of dropout. If None, as many as a processor's caches hold, or the
        whole batch if there are none or the model is the larger part; if the number drawn is
        random, 32 at most and fewer for small batches, so that clients computed alone spend about a
        seventh on padding.
      update_transforms: changes of the delta before it leaves, in order. Under a private rule
        each must declare that it reads no records, see `update_transform`.
      augmentation: changes the records of every batch, see `data.augmentation.compose`; none if
        None. Its draws depend on the round, the client, the step and the record alone.

    Returns:
      The trainer.

    Raises:
      ValueError: for a bad number, a private rule with a sampler that has no analysis,
        micro-batches of a model that mixes examples, or an update transform that reads records
        under a private rule.
    """
    sampler = sampler or sampling.shuffled()
    rule = gradient_rule or gradients.plain(model)
    is_private = rule.event is not None
    config.validate(limits=ranges_of(optimizer))
    own_transforms = declared("update_transforms", update_transforms, is_private=is_private)
    if is_private:
        for name in ("clip_norm", "noise_multiplier"):
            value = getattr(config, name)
            checks.require(value is not None, name, "be given for private training", value)
        sampler.event(dp_accounting.GaussianDpEvent(1.0), 2, 1)
    if micro_batch_size is not None:
        checks.whole("micro_batch_size", micro_batch_size)
        checks.require(
            not model.mixes_examples,
            "micro_batch_size",
            "be None for a model that mixes examples: micro-batches would change its result",
            micro_batch_size,
        )
    check_whole(sampler, config.num_steps, config.batch_size)
    if model.mixes_examples:
        checks.require(
            not sampler.varies,
            "sampler",
            "draw a fixed number of examples for a model that mixes examples",
            sampler.name,
        )
    training = TrainingLoop(
        model,
        rule,
        sampler,
        optimizer,
        own_transforms,
        micro_batch_size,
        config.max_batch_size(),
        _widest_micro_batch(config.batch_size) if sampler.varies else None,
        augmentation=augmentation,
    )
    if optimizer is not optax.sgd:
        warn_of_schedules(model, training.optimizer_of(first_of(config)))
    return training.trainer(config)


def check_whole(sampler: sampling.Sampler, num_steps: Any, batch_size: Any) -> None:
    """Refuses fractions of steps, and of batches where a fixed number of examples is drawn."""
    for name, value in (("num_steps", num_steps), ("batch_size", batch_size)):
        is_any = value is None or (name == "batch_size" and sampler.varies)
        is_whole = is_any or bool(np.all(np.mod(value, 1) == 0))
        checks.require(is_whole, name, f"be an integer with the sampler {sampler.name!r}", value)


def _widest_micro_batch(batch_size: Any) -> int:
    """Bounds the number of examples of a batch of random size that are computed at once."""
    # A step leaves half a micro-batch empty on average, and 1/b of the steps read one example.
    half_empty = float(np.mean(1.0 / np.asarray(batch_size, np.float64))) / 2
    size = 32
    while size > 8 and size * half_empty > _PADDING / (1 - _PADDING):
        size //= 2
    return size


@checked
def dp_sgd_trainer(
    model: Model,
    config: LocalConfig,
    *,
    per_layer: bool = False,
    sampler: sampling.Sampler | None = None,
    **options: Any,
) -> LocalTrainer:
    """Builds record-level DP-SGD: Poisson batches, per-example clipping, Gaussian noise.

    Guarantee: unit of privacy is one record of the client, zeroed out by default: rates, steps and
    divisors follow from the client's exact size, which is public. Everything that the client sends
    is covered by `LocalTrainer.claim`.

    Args:
      model: the model to train; its examples must not influence one another.
      config: the numbers of training with `clip_norm` and `noise_multiplier`, scalars or
        `[num_clients]`.
      per_layer: clip layer by layer instead of over the whole gradient.
      sampler: exact Poisson sampling if None.
      **options: further options of `local_trainer`.

    Returns:
      The trainer.

    Source: Abadi and others 2016, algorithm 1.
    """
    return local_trainer(
        model,
        config,
        sampler=sampler or sampling.poisson(),
        gradient_rule=gradients.clipped(model, per_layer=per_layer),
        **options,
    )
