"""A model as a value: pure functions for its parameters, its outputs and its losses."""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.forks import require_not_forked
from fedjax_dp.core.products import arithmetic
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import adapters, kinds, lowering
from fedjax_dp.models.adapters import Apply
from fedjax_dp.models.copies import Copies
from fedjax_dp.models.kinds import Where
from fedjax_dp.models.losses import Batch, CorrectFn, LossFn, resolve


def _same(params: PyTree) -> PyTree:
    return params


class Model(NamedTuple):
    """A model: the functions that training and evaluation need.

    Attributes:
      name: the name in reports.
      init: `init(key) -> params`. The parameters are everything that is trained, sent and averaged,
        including buffers such as batch-norm statistics, but not frozen parameters.
      apply: `apply(params, x, *, is_training=False, key=None, mask=None) -> (outputs, params)`.
        The outputs are `[examples, ...]`; the second result is `params` with refreshed buffers, the
        same object if nothing is refreshed. `is_training` is a Python bool, `key` feeds dropout,
        and `mask [examples]` says which rows are real.
      loss_fn: `loss_fn(outputs, batch) -> losses [examples]`, float32 or better.
      correct_fn: `correct_fn(outputs, batch) -> (correct, weight)`, each `[examples]`; the ratio of
        their sums is the accuracy. None if accuracy has no meaning, as in regression.
      mixes_examples: whether, in training, the output of one example depends on others, as under
        batch normalisation. Per-example clipping refuses such models.
      buffer_keys: names the buffers among `params`, whose leaves no gradient reaches and training
        refreshes, in the form of `kinds.marked`; empty if none.
      full_params: `full_params(params) -> params` with the frozen parameters, for use without the
        `Model`; the same object if nothing is frozen.
      frozen: the frozen parameters, part by part, as `freeze` adds them.
      is_quadratic: whether the loss of every example is a quadratic function of the parameters,
        which exact proximal steps require; it cannot be checked.
    """

    name: str
    init: Callable[[PRNGKey], PyTree]
    apply: Apply
    loss_fn: LossFn
    correct_fn: CorrectFn | None
    mixes_examples: bool
    buffer_keys: Where = ()
    full_params: Callable[[PyTree], PyTree] = _same
    is_quadratic: bool = False
    frozen: tuple[kinds.Frozen, ...] = ()

    @property
    def constants(self) -> PyTree:
        """The frozen values, as an argument for a compiled function that reads them by `given`."""
        return tuple(part.constants for part in self.frozen)

    def given(self, constants: PyTree) -> AbstractContextManager[None]:
        """Reads frozen values from an argument of the function that is being traced.

        Without it a compiled program contains the model's values as constants.

        Args:
          constants: arrays in the structure of `Model.constants`.

        Returns:
          The context in which to call the model, inside a function that is compiled.
        """
        return kinds.given(self.frozen, constants)

    def losses(
        self,
        params: PyTree,
        batch: Batch | Copies,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Computes the loss of every example.

        Examples that `mask` excludes are zeroed before the model sees them, so that nothing in
        them, NaN included, reaches a loss or a gradient.

        Args:
          params: the model's parameters.
          batch: named arrays `[examples, ...]`, of which "x" are the inputs; or `Copies` of them,
            whose mean loss is that of an example.
          is_training: whether dropout and batch statistics are on; a Python bool.
          key: feeds dropout; may be None if the model draws nothing.
          mask: which rows are real, `[examples]`, bool; None if all are.

        Returns:
          The losses, `[examples]`, 0 in rows that are not real, and `params` with refreshed
          buffers.
        """
        if isinstance(batch, Copies):
            of_copies = None if mask is None else batch.repeated(mask)
            values, params = self.losses(
                params, batch.flat(), is_training=is_training, key=key, mask=of_copies
            )
            return batch.mean(values), params
        examples: Batch = batch
        if mask is not None:
            examples = jax.tree.map(lambda leaf: _zero_padding(leaf, mask), dict(batch))
        outputs, params = self.apply(
            params, examples["x"], is_training=is_training, key=key, mask=mask
        )
        values = self.loss_fn(outputs, examples)
        return (values if mask is None else jnp.where(mask, values, 0)), params

    def predict(self, params: PyTree, x: PyTree) -> PyTree:
        """Computes outputs as in evaluation: no dropout, batch norm by its running statistics.

        Args:
          params: the model's parameters.
          x: inputs, `[examples, ...]`.

        Returns:
          The outputs, `[examples, ...]`.
        """
        return self.apply(params, x)[0]

    def is_buffer(self, params: PyTree) -> PyTree:
        """Marks the buffers, which no gradient reaches and an optimiser should leave alone.

        Args:
          params: the model's parameters, or anything of their structure.

        Returns:
          A tree of bools of the structure of `params`.
        """
        return kinds.marked(params, self.buffer_keys)

    def freeze(
        self, where: Where, params: PyTree, *, mixes_examples: bool | None = None
    ) -> "Model":
        """Excludes parameters from training and stores their values in the model.

        Frozen parameters are not among the new model's parameters: they are not copied, clipped,
        noised, sent, averaged, counted or saved by client, and no gradient is computed for them.
        Rounds and evaluations take them as an argument; other programs can (`given`).

        A model all of whose buffers are frozen is applied as in evaluation: batch norm by the
        frozen statistics, without dropout.

        Args:
          where: a path such as "params/Dense_0/kernel", a pattern such as "params/*/kernel", a part
            above them such as "params/Dense_0", several of these, or `(path, leaf) -> bool`.
          params: the values: a tree that holds the frozen parameters at least, under the same
            paths, such as `init(key)` or what was read from a file.
          mixes_examples: whether, in training, examples still influence one another; None keeps the
            value. Freezing all statistics of a batch norm ends it, which cannot be checked: a wrong
            value voids per-example clipping.

        Returns:
          The model of the remaining parameters; its `full_params` returns all parameters.

        Raises:
          ValueError: for a pattern that matches nothing, naming the nearest path; if nothing or
            everything is frozen; or if a value is missing or of another shape.
        """
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        held = kinds.frozen(shapes, where, params)
        left = jax.tree.leaves(held.without(self.is_buffer(shapes)))
        is_still = bool(self.buffer_keys) and not any(left)

        def apply(
            params: PyTree, x: PyTree, *, is_training: bool = False, **arguments: Any
        ) -> tuple[Any, PyTree]:
            full = held.within(params)
            outputs, refreshed = self.apply(
                full, x, is_training=is_training and not is_still, **arguments
            )
            return outputs, params if refreshed is full else held.without(refreshed)

        return self._replace(
            init=lambda key: held.without(self.init(key)),
            apply=apply,
            mixes_examples=self.mixes_examples if mixes_examples is None else mixes_examples,
            buffer_keys=self.buffer_keys if any(left) else (),
            full_params=lambda params: self.full_params(held.within(params)),
            frozen=(*self.frozen, held),
        )

    def with_params(self, params: PyTree) -> "Model":
        """Sets the parameters that training starts from, such as pretrained ones.

        Args:
          params: a tree of arrays, or arrays by path, such as "params/Dense_0/kernel", as
            `io.params.read_params` reads them from a file; other parameters start as before.

        Returns:
          The model; its `init` draws only the other parameters.

        Raises:
          ValueError: for a path that the model does not have, naming the nearest, or an array of
            another shape.
        """
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        of_model = dict(zip(trees.paths(shapes), jax.tree.leaves(shapes), strict=True))
        given = dict(zip(trees.paths(params), jax.tree.leaves(params), strict=True))
        checks.require(bool(given), "params", "hold at least one array", params)
        for path, value in given.items():
            checks.one_of("params", path, of_model)
            kinds.require_real(f"params {path}", value)
            shape = of_model[path].shape
            rule = f"have shape {list(shape)} as in {self.name}"
            checks.require(np.shape(value) == shape, f"params {path}", rule, list(np.shape(value)))

        def init(key: PRNGKey) -> PyTree:
            leaves, structure = jax.tree.flatten(self.init(key))
            put = [
                jnp.asarray(given[path], leaf.dtype) if path in given else leaf
                for path, leaf in zip(of_model, leaves, strict=True)
            ]
            return jax.tree.unflatten(structure, put)

        return self._replace(init=init)

    @classmethod
    def from_flax(
        cls,
        module: nn.Module,
        example_x: PyTree,
        *,
        loss: str | LossFn,
        correct_fn: CorrectFn | None = None,
        name: str | None = None,
        mixes_examples: bool | None = None,
        rng_streams: Sequence[str] = ("dropout",),
        lower: bool = True,
    ) -> "Model":
        """Wraps a Flax Linen module.

        The parameters are the module's variables; collections besides "params", such as
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
          name: the name in reports; None takes the name of the module's class.
          mixes_examples: whether outputs depend on other examples in training; None means yes if
            there are collections besides "params".
          rng_streams: names under which the module draws random numbers in `apply`.
          lower: whether layers are rewritten for speed, as `models.lower` does.

        Returns:
          The model.

        Raises:
          ValueError: from `apply`, if the first axis of a batch norm's inputs is not that of the
            mask.
        """
        require_not_forked()
        init, apply, buffer_keys, shapes = adapters.linen_functions(
            module, example_x, tuple(rng_streams)
        )
        model = cls(
            name or type(module).__name__.lower(),
            init,
            _lowered(apply) if lower else apply,
            *resolve(loss, correct_fn),
            False,
            buffer_keys,
        )
        return _of_floats(model, shapes, mixes_examples, example_x)

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
        """Wraps a Flax NNX module, given by the function that builds it.

        The parameters are a dict: "params" holds every `nnx.Param`, "batch_stats" all other state
        but random streams; it gets zero gradient and is refreshed in training. Random streams are
        keyed by `apply`'s `key`, and `train()` and `eval()` are set from `is_training`.

        Args:
          constructor: `constructor(nnx.Rngs) -> nnx.Module`; the module is called with inputs
            `[examples, ...]` and, if its `__call__` names them, `is_training`, `train`,
            `training`, `deterministic`, `use_running_average` or `mask`.
          loss: a name from `losses.NAMES` or `(outputs, batch) -> losses [examples]`.
          correct_fn: `(outputs, batch) -> (correct, weight)`; None takes that of a named loss.
          name: the name in reports; None takes the name of the module's class.
          mixes_examples: whether outputs depend on other examples in training; None means yes if
            there is state besides parameters and random streams.
          lower: whether layers are rewritten for speed, as `models.lower` does.

        Returns:
          The model.

        Raises:
          ValueError: if the module holds batch statistics and its `__call__` takes no `mask`.
        """
        from fedjax_dp.models.nnx_adapters import nnx_functions

        require_not_forked()
        init, apply, buffer_keys, shapes, class_name = nnx_functions(constructor)
        model = cls(
            name or class_name.lower(),
            init,
            _lowered(apply) if lower else apply,
            *resolve(loss, correct_fn),
            False,
            buffer_keys,
        )
        return _of_floats(model, shapes, mixes_examples)

    @classmethod
    @checked
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
        buffer_keys: Where = (),
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
          name: the name in reports.
          mixes_examples: whether outputs depend on other examples in training. This cannot be
            checked; a wrong value voids per-example clipping.
          refreshes_buffers: whether `apply` returns `(outputs, params)` instead of the outputs.
          buffer_keys: the buffers: top-level keys of the parameters, or a pattern or predicate as
            in `freeze`. Buffers that are not refreshed and have the same initial value under any
            key are constants, and frozen.
          lower: whether layers are rewritten for speed, as `models.lower` does.

        Returns:
          The model.
        """
        require_not_forked()
        wrapped = adapters.plain_apply(apply, refreshes_buffers)
        model = cls(
            name,
            init,
            _lowered(wrapped) if lower else wrapped,
            *resolve(loss, correct_fn),
            mixes_examples,
            buffer_keys if callable(buffer_keys) else kinds.patterns(buffer_keys),
        )
        if not refreshes_buffers and model.buffer_keys:
            model = _with_constants(model, model.buffer_keys) or model
        if refreshes_buffers:
            # Which of them are constant is not known.
            return model
        return _of_floats(model, jax.eval_shape(model.init, jax.random.key(0)), mixes_examples)


def _with_constants(model: Model, where: Where) -> Model | None:
    """Freezes buffers that nothing refreshes; None if they depend on the key of `init`."""

    @jax.jit
    def buffers_of(key: PRNGKey) -> PyTree:
        params = model.init(key)
        is_constant = kinds.marked(params, where)
        return jax.tree.map(lambda leaf, flag: leaf if flag else None, params, is_constant)

    values, others = (jax.device_get(buffers_of(jax.random.key(i))) for i in range(2))
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, values, others))):
        return None
    # Without buffers that could be frozen, no batch norm is applied as in evaluation.
    held = model._replace(buffer_keys=()).freeze(where, values)
    left = kinds.marked(jax.eval_shape(held.init, jax.random.key(0)), model.buffer_keys)
    return held._replace(buffer_keys=model.buffer_keys if any(jax.tree.leaves(left)) else ())


def _of_floats(
    model: Model, shapes: PyTree, mixes_examples: bool | None, example_x: PyTree = None
) -> Model:
    """Freezes buffers that are not of real floats and constant; refuses others of such types.

    Examples mix by default if there are other buffers. Without an example, buffers that training
    changes are refused where it is traced.
    """
    others: list[str] = []
    leaves = map(jax.tree.leaves, (shapes, model.is_buffer(shapes)))
    for path, leaf, is_buffer in zip(trees.paths(shapes), *leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        others.append(path)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        rule = "be of real floating-point numbers, which can be trained and averaged over clients; "
        rule += (
            "random keys are drawn from the key that apply is given"
            if is_key
            else ("what is constant is declared a buffer, another collection or nnx.Variable")
        )
        what = f"parameter {path} of {model.name}"
        checks.require(is_buffer and not is_key, what, rule, str(leaf.dtype))
    if others:
        held = _with_constants(model, lambda path, leaf: path in others)
        rule = "be of floating-point numbers, which can be averaged, or the same under any key"
        what = f"state {', '.join(others)} of {model.name}"
        checks.require(held is not None, what, rule, "other types, drawn by init")
        if example_x is not None:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example_x)
            train = partial(model.apply, is_training=True)
            key = jax.random.key(0)
            jax.eval_shape(lambda params, x: train(params, x, key=key), shapes, one)
        model = held or model
    mixes = bool(model.buffer_keys) if mixes_examples is None else mixes_examples
    return model._replace(mixes_examples=mixes)


def _zero_padding(leaf: jax.typing.ArrayLike, mask: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jnp.where(mask.reshape(mask.shape + (1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))


def _lowered(apply: Apply) -> Apply:
    rewritten = lowering.lower(apply)

    def lowered_apply(params: PyTree, x: PyTree, **arguments: Any) -> tuple[Any, PyTree]:
        if arithmetic().convolutions == "native":
            return apply(params, x, **arguments)
        outputs, refreshed = rewritten(params, x, **arguments)
        before, after = jax.tree.leaves(params), jax.tree.leaves(refreshed)
        is_same = len(before) == len(after) and all(map(operator.is_, before, after))
        return outputs, params if is_same else refreshed

    return lowered_apply
