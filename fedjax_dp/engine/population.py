"""The population of a federation: sizes and shapes of its clients' data, and their examples."""

from typing import NamedTuple

import jax
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.engine.cohort import Examples


class Population(NamedTuple):
    """The sizes and shapes of clients' data, all that a federation is built from."""

    sizes: np.ndarray  # Examples of each client, `[num_clients]`, int32.
    structure: PyTree  # Shapes of all examples, by name.
    validation: "Population | None" = None  # A second split of the same clients.

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    @property
    def limit(self) -> int:
        """The size of the largest client, at least 1."""
        return max(1, int(self.sizes.max()))


@checked
def population_of(data: FederatedData, validation: FederatedData | None = None) -> Population:
    """Finds sizes and shapes of the clients' data.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The population.

    Raises:
      ValueError: if a split has no examples, or too many, or they are not of the same clients, or
        shapes or types of their examples differ.
    """
    first = _population("data", data)
    if validation is None:
        return first
    rule = f"hold a second split of the {data.num_clients} clients"
    same = validation.num_clients == data.num_clients
    checks.require(same, "validation", rule, validation.num_clients)
    expected, found = (_kinds(split) for split in (data, validation))
    rule = f"hold examples of the shapes and types of data, {expected}"
    checks.require(found == expected, "validation", rule, found)
    return first._replace(validation=_population("validation", validation))


def _population(name: str, data: FederatedData) -> Population:
    rule = "hold at least one and fewer than 2**31 examples"
    checks.require(0 < data.num_examples < 2**31, name, rule, data.num_examples)
    kept = jax.dtypes.canonicalize_dtype
    shapes = {k: jax.ShapeDtypeStruct(v.shape, kept(v.dtype)) for k, v in data.examples.items()}
    return Population(data.sizes.astype(np.int32), nested(shapes))


def _kinds(data: FederatedData) -> dict[str, str]:
    """Describes one example of each array, such as `float32[28, 28]`."""
    return {k: f"{v.dtype}{list(v.shape[1:])}" for k, v in sorted(data.examples.items())}


@checked
def examples_of(data: FederatedData, validation: FederatedData | None = None) -> Examples:
    """Returns all examples of a population, as a round reads them.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The examples on the host, for `jax.device_put`.
    """
    return Examples(
        nested({name: np.asarray(array) for name, array in data.examples.items()}),
        data.offsets[:-1].astype(np.int32),
        data.sizes.astype(np.int32),
        None if validation is None else examples_of(validation),
        max(1, int(data.sizes.max())),
    )
