"""A model as a value: pure functions for its parameters, its outputs and its losses."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import adapters, lowering
from fedjax_dp.models.losses import Batch, CorrectFn, LossFn, resolve


class Model(NamedTuple):
    """Holds what training and evaluation need to know of a model.

    Attributes:
      name: what reports call it.
      init: `init(key) -> params`. The parameters are everything that is trained, sent and averaged,
        buffers such as batch-norm statistics included.
      apply: `apply(params, x, *, is_training=False, key=None, mask=None) -> (outputs, params)`.
        The outputs are `[examples, ...]`; the second result is `params` with refreshed buffers, the
        same object where nothing is refreshed. `is_training` is a Python bool, `key` feeds dropout,
        and `mask [examples]` says which rows are real.
      loss_fn: `loss_fn(outputs, batch) -> losses [examples]`, float32 or better.
      correct_fn: `correct_fn(outputs, batch) -> (correct, weight)`, each `[examples]`; the ratio of
        their sums is the accuracy. None where accuracy has no meaning, as in regression.
      mixes_examples: whether, in training, the output of one example depends on others, as under
        batch normalisation. Per-example clipping refuses such models.
      buffer_keys: the top-level keys of `params` whose leaves no gradient reaches.
    """

    name: str
    init: Callable[[PRNGKey], PyTree]
    apply: Callable[..., tuple[Any, PyTree]]
    loss_fn: LossFn
    correct_fn: CorrectFn | None
    mixes_examples: bool
    buffer_keys: tuple[str, ...] = ()

    def losses(
        self,
        params: PyTree,
        batch: Batch,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Computes the loss of every example.

        Rows that `mask` rules out are set to zero before the model sees them, so that whatever
        they hold, NaN included, reaches neither a loss nor a gradient.

        Args:
          params: the model's parameters.
          batch: named arrays `[examples, ...]`, of which "x" are the inputs.
          is_training: whether dropout and batch statistics are on; a Python bool.
          key: feeds dropout; may be None where the model draws nothing.
          mask: which rows are real, `[examples]`, bool; None where all are.

        Returns:
          The losses, `[examples]`, 0 in rows that are not real, and `params` with refreshed
          buffers.
        """
        if mask is not None:
            batch = jax.tree.map(lambda leaf: _zero_padding(leaf, mask), dict(batch))
        outputs, params = self.apply(
            params, batch["x"], is_training=is_training, key=key, mask=mask
        )
        values = self.loss_fn(outputs, batch)
        return (values if mask is None else jnp.where(mask, values, 0)), params

    def predict(self, params: PyTree, x: Any) -> Any:
        """Computes outputs as in evaluation: no dropout, batch norm by its running statistics.

        Args:
          params: the model's parameters.
          x: inputs, `[examples, ...]`.

        Returns:
          The outputs, `[examples, ...]`.
        """
        return self.apply(params, x)[0]

    def is_buffer(self, params: PyTree) -> PyTree:
        """Marks the leaves that no gradient reaches, which an optimiser should leave alone.

        Args:
          params: the model's parameters, or anything of their structure.

        Returns:
          A tree of bools of the structure of `params`.
        """
        if not self.buffer_keys:
            return jax.tree.map(lambda _: False, params)
        return {
            name: jax.tree.map(lambda _, flag=name in self.buffer_keys: flag, part)
            for name, part in params.items()
        }

    @classmethod
    def from_flax(
        cls,
        module: Any,
        example_x: Any,
        *,
        loss: str | LossFn,
        correct_fn: CorrectFn | None = None,
        name: str | None = None,
        mixes_examples: bool | None = None,
        rng_streams: Sequence[str] = ("dropout",),
        lower: bool = True,
    ) -> "Model":
        """Wraps a Flax Linen module.

        The parameters are the module's variables; collections beside "params", such as
        "batch_stats", travel with them, get zero gradient and are refreshed in training. Of the
        keyword arguments `is_training`, `train`, `training`, `deterministic`,
        `use_running_average` and `mask`, the module is passed those that its `__call__` names.
        Every `BatchNorm` is given the mask without the module having to pass it on.

        Args:
          module: a `flax.linen.Module` called with inputs `[examples, ...]`.
          example_x: shape and type of one input without the axis of examples: an array or a
            `jax.ShapeDtypeStruct`, or a tree of them. Nothing of its size is allocated.
          loss: a name from `losses.NAMES` or `(outputs, batch) -> losses [examples]`.
          correct_fn: `(outputs, batch) -> (correct, weight)`; None takes that of a named loss.
          name: what reports call it; None takes the name of the module's class.
          mixes_examples: whether outputs depend on other examples in training; None answers yes
            where there are collections beside "params".
          rng_streams: names under which the module draws random numbers in `apply`.
          lower: whether convolutions and pooling are rewritten as matrix products.

        Returns:
          The model.

        Raises:
          ValueError: from `apply`, if a batch norm sees inputs whose first axis is not the axis of
            the mask.
        """
        init, apply, buffer_keys = adapters.linen_functions(module, example_x, tuple(rng_streams))
        return cls(
            name or type(module).__name__.lower(),
            init,
            _lowered(apply) if lower else apply,
            *resolve(loss, correct_fn),
            bool(buffer_keys) if mixes_examples is None else mixes_examples,
            buffer_keys,
        )

    @classmethod
    def from_nnx(
        cls,
        constructor: Callable[[Any], Any],
        *,
        loss: str | LossFn,
        correct_fn: CorrectFn | None = None,
        name: str | None = None,
        mixes_examples: bool | None = None,
        lower: bool = True,
    ) -> "Model":
        """Wraps a Flax NNX module, given as the function that builds it.

        The parameters are a dict: "params" holds every `nnx.Param`, "batch_stats" all other state
        but random streams; it gets zero gradient and is refreshed in training. Random streams are
        keyed by `apply`'s `key`, and `train()` and `eval()` are set from `is_training`.

        Args:
          constructor: `constructor(nnx.Rngs) -> nnx.Module`; the module is called with inputs
            `[examples, ...]` and, where its `__call__` names them, `is_training`, `train`,
            `training`, `deterministic`, `use_running_average` or `mask`.
          loss: a name from `losses.NAMES` or `(outputs, batch) -> losses [examples]`.
          correct_fn: `(outputs, batch) -> (correct, weight)`; None takes that of a named loss.
          name: what reports call it; None takes the name of the module's class.
          mixes_examples: whether outputs depend on other examples in training; None answers yes
            where there is state beside parameters and random streams.
          lower: whether convolutions and pooling are rewritten as matrix products.

        Returns:
          The model.

        Raises:
          ValueError: if the module holds batch statistics and its `__call__` takes no `mask`.
        """
        init, apply, buffer_keys, class_name = adapters.nnx_functions(constructor)
        return cls(
            name or class_name.lower(),
            init,
            _lowered(apply) if lower else apply,
            *resolve(loss, correct_fn),
            bool(buffer_keys) if mixes_examples is None else mixes_examples,
            buffer_keys,
        )

    @classmethod
    def from_functions(
        cls,
        init: Callable[[PRNGKey], PyTree],
        apply: Callable[..., Any],
        *,
        loss: str | LossFn,
        correct_fn: CorrectFn | None = None,
        name: str = "functions",
        mixes_examples: bool = False,
        refreshes_buffers: bool = False,
        buffer_keys: Sequence[str] = (),
        lower: bool = True,
    ) -> "Model":
        """Wraps plain functions.

        Args:
          init: `init(key) -> params`.
          apply: `apply(params, x) -> outputs [examples, ...]`; of the keyword arguments
            `is_training`, `train`, `training`, `deterministic`, `key` and `mask`, it is passed
            those that it names.
          loss: a name from `losses.NAMES` or `(outputs, batch) -> losses [examples]`.
          correct_fn: `(outputs, batch) -> (correct, weight)`; None takes that of a named loss.
          name: what reports call it.
          mixes_examples: whether outputs depend on other examples in training. Nothing can check
            this; a wrong answer voids per-example clipping.
          refreshes_buffers: whether `apply` returns `(outputs, params)` instead of the outputs.
          buffer_keys: the top-level keys of the parameters whose leaves are buffers.
          lower: whether convolutions and pooling are rewritten as matrix products.

        Returns:
          The model.
        """
        wrapped = adapters.plain_apply(apply, refreshes_buffers)
        return cls(
            name,
            init,
            _lowered(wrapped) if lower else wrapped,
            *resolve(loss, correct_fn),
            mixes_examples,
            tuple(buffer_keys),
        )


def _zero_padding(leaf: Any, mask: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jnp.where(mask.reshape(mask.shape + (1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))


def _lowered(apply: Callable[..., Any]) -> Callable[..., Any]:
    rewritten = lowering.lower(apply)

    def lowered_apply(params: PyTree, x: Any, **arguments: Any) -> tuple[Any, PyTree]:
        outputs, refreshed = rewritten(params, x, **arguments)
        before, after = jax.tree.leaves(params), jax.tree.leaves(refreshed)
        is_same = len(before) == len(after) and all(map(operator.is_, before, after))
        return outputs, params if is_same else refreshed

    return lowered_apply
