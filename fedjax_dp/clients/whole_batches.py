"""Whole batches: steps on all records of a client, and on perturbed copies of each."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Lt
from chex import PRNGKey

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.trees import PyTree

# `(example, key) -> example` of the same shapes, one record alone.
Perturb: TypeAlias = Callable[[Any, PRNGKey], Any]

# The batch size that stands for all records.
WHOLE = np.float32(np.inf)


class WholeBatches(NamedTuple):
    """A step on all records of a client, each as `num_copies` copies, itself included.

    A record's gradient is the mean of its copies' clipped gradients, so that its bound stays the
    same. `perturb`, `(example, key) -> example`, makes a copy; None without copies. `largest` is
    the largest batch of other steps, 0 if none exceeds those that training was built with.
    """

    num_copies: int = 1
    perturb: Perturb | None = None
    largest: int = 0

    def copies(
        self, batch: PyTree, rows: jax.Array, copy: jax.Array, is_copied: jax.Array, key: PRNGKey
    ) -> PyTree:
        """Returns one copy of each record of a micro-batch; the first copy is the record itself."""
        perturb = self.perturb
        if perturb is None:
            return batch

        def one(example, row):
            made = perturb(example, jax.random.fold_in(jax.random.fold_in(key, row), copy))
            shapes = [
                jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a).name), record)
                for record in (made, example)
            ]
            rule = "keep the names, shapes and types of a record"
            checks.require(shapes[0] == shapes[1], "perturb", rule, shapes[0])
            return made

        made = jax.vmap(one)(batch, rows)
        return jax.tree.map(lambda a, b: jnp.where(is_copied & (copy > 0), a, b), made, batch)


@checked
def gaussian_copies(
    num_copies: Annotated[int, Ge(2), Lt(COUNT_LIMIT)], stddev: Positive
) -> WholeBatches:
    """Perturbs copies of records by Gaussian noise of a standard deviation on their inputs, "x".

    Source: Malekmohammadi and others 2024 (RC-DPFL), section 4.3, which does not define the
    perturbations.
    """

    def perturb(example, key):
        has_inputs = isinstance(example, Mapping) and "x" in example
        rule = "hold inputs under 'x', or have a custom function `perturb`"
        names = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        checks.require(has_inputs, "record", rule, names)
        leaves, structure = jax.tree.flatten(example["x"])
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        checks.require(
            all(is_float),
            "num_copies",
            "be 1 if inputs are not floats, to which noise can be added",
            num_copies,
        )
        moved = [
            leaf
            + (stddev * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)).astype(
                leaf.dtype
            )
            for i, leaf in enumerate(leaves)
        ]
        return {**example, "x": jax.tree.unflatten(structure, moved)}

    return WholeBatches(num_copies, perturb)


def check_copies(options: Mapping[str, Any], prefix: str) -> None:
    """Requires `copy_stddev` if `num_copies` is above 1, and only then."""
    copies, stddev = options["num_copies"], options["copy_stddev"]
    rule = "be given if num_copies is above 1, and left out if it is 1"
    checks.require((stddev is not None) == (copies > 1), f"{prefix}copy_stddev", rule, stddev)


def is_whole(config: LocalConfig) -> Any:
    """Checks whether a step reads all records."""
    return jnp.isinf(jnp.asarray(config.batch_size, jnp.float32))


def with_size(config: LocalConfig, size: Any) -> LocalConfig:
    """Replaces a batch size that means all records by their number."""
    every = jnp.maximum(jnp.asarray(size, jnp.float32), 1.0)
    batch = jnp.where(is_whole(config), every, config.batch_size)
    return config._replace(batch_size=batch)
