"""The mean accuracy of the clients with noise: a metric that a private run may follow."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Batch
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms import Mechanism

# Its name in rows and summaries.
METRIC = "noised_client_accuracy"
# Accuracies and noise are rounded to multiples of 2 to a power, so many bits finer than the noise,
# which float32 holds, and no finer than this, so that float64 holds the sums of 2^33 clients.
_BITS, _FINEST = 12, -20


def by_rows(model: Model) -> Model:
    """Returns a model that evaluates each row by itself, so that no row changes that of another."""
    correct_fn = model.correct_fn
    assert correct_fn is not None

    def apply(params: PyTree, x: PyTree, **arguments: Any) -> tuple[PyTree, PyTree]:
        rule = "be left out: rows are evaluated one by one"
        checks.require(not arguments, "arguments of apply", rule, sorted(arguments))
        return _row_by_row(lambda row: model.apply(params, row)[0], x), params

    def correct(outputs: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return _row_by_row(lambda row: correct_fn(*row), (outputs, batch))

    return model._replace(apply=apply, correct_fn=correct)


def _row_by_row(function: Callable[[PyTree], Any], rows: PyTree) -> Any:
    """Applies a function of a batch to batches of one row each."""

    def one(row: PyTree) -> Any:
        found = function(jax.tree.map(lambda a: a[None], row))
        return jax.tree.map(lambda a: a[0], found)

    jaxprs.require_apart(jax.make_jaxpr(one)(jax.tree.map(lambda a: a[0], rows)))
    return jax.vmap(one)(rows)


class NoisedAccuracy(NamedTuple):
    """The release of a noised mean of accuracies, after every so many rounds.

    Guarantee: the unit of privacy is one client; all clients take part in each release, which costs
    one Gaussian event without amplification. One client adds a number in [0, 1] to the sum,
    whatever its accuracy is said to be; the divisor is the public number of clients. It rests on
    accuracies each of which depends on the model and on the data of that client alone, as those of
    models by rows do.

    Attributes:
      noise_multiplier: standard deviation of the noise of the sum, above 0.
      every: rounds between two releases.
    """

    noise_multiplier: float
    every: int

    @property
    def mechanism(self) -> Mechanism:
        """The noise and its price, of the same float32."""
        return mechanisms.gaussian(1.0, float(np.float32(self.noise_multiplier)))

    @property
    def unit(self) -> float:
        """What sums are multiples of, so that no digit of one shows without noise."""
        return 2.0 ** max(math.frexp(self.noise_multiplier)[1] - _BITS, _FINEST)

    def event(self, num_releases: int = 1) -> DpEvent:
        """Returns the event of some releases."""
        return dpa.SelfComposedDpEvent(self.mechanism.event(), num_releases)

    def num_releases(self, first: int, last: int) -> int:
        """Counts the releases after the rounds from `first + 1` to `last`."""
        return last // self.every - first // self.every

    def release(self, key: PRNGKey, client_accuracy: Any) -> float:
        """Computes the noised mean of accuracies, `[num_clients]`; 0 for one that is not finite."""
        exact = np.asarray(client_accuracy, np.float64)
        bounded = np.clip(np.where(np.isfinite(exact), exact, 0.0), 0.0, 1.0)
        # Added in float64: a float32 sum of many clients would be rounded by more than one adds.
        total = np.sum(np.round(bounded / self.unit))
        noise = np.round(float(self.mechanism.add_noise(key, jnp.zeros(()))) / self.unit)
        return float((total + noise) * self.unit / len(exact))
