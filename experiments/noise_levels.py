"""How much noise record-level DP leaves in updates: formulas of Malekmohammadi and others.

A variance here is the sum of the variances of all coordinates, as in the papers; numbers of clients
are scalars or `[clients]`.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.privacy import calibrate_poisson


def clipped_gradient_variance(
    noise_multiplier: ArrayLike, batch_size: ArrayLike, *, clip_norm: float, num_parameters: int
) -> np.ndarray:
    """Computes `p c² z²/b²`, the noise of a DP-SGD gradient whose examples are clipped.

    The spread of the clipped gradients, small beside it, is left out.

    Source: Malekmohammadi and others 2024, (3.3).
    """
    z, b = np.asarray(noise_multiplier, np.float64), np.asarray(batch_size, np.float64)
    return num_parameters * (np.float64(clip_norm) * z / b) ** 2


def update_variance(
    gradient_variance: ArrayLike,
    num_examples: ArrayLike,
    batch_size: ArrayLike,
    *,
    learning_rate: float,
    num_epochs: ArrayLike = 1,
    rounds_steps_up: bool = True,
) -> np.ndarray:
    """Computes `K ⌈N/b⌉ η² Var(g)`, the variance of a client's update after its local steps.

    With (3.3) for the gradient and unrounded steps this is lemma 4.1 of the clustered paper,
    `K N η² p c² z²/b³`. How the noise of one step moves the gradients of later ones is left out:
    exact for a linear loss, first order otherwise.

    Source: Malekmohammadi and others 2024, (3.5); Malekmohammadi and others 2025, lemma 4.1.
    """
    steps = _steps(num_examples, batch_size, rounds_steps_up)
    eta = np.asarray(learning_rate, np.float64)
    return np.asarray(num_epochs, np.float64) * steps * eta**2 * np.asarray(gradient_variance)


def inverse_variance_weights(variance: ArrayLike) -> np.ndarray:
    """Computes the weights of clients that sum to one and average with the least variance."""
    inverse = 1.0 / np.asarray(variance, np.float64)
    return inverse / inverse.sum()


def noise_multiplier_of_run(
    epsilon: ArrayLike,
    dp_delta: float,
    num_examples: ArrayLike,
    batch_size: ArrayLike,
    *,
    num_rounds: int,
    first_batch_size: ArrayLike | None = None,
    accountant: str = "rdp",
) -> np.ndarray:
    """Finds z of clients that pass once over their data, in Poisson batches, in every round.

    The first round may have batches of another size. An epoch takes ⌈N/b⌉ steps, as it does when it
    runs; the recipe "rdp-classic-64" counts N/b, as its authors do.

    Source: Malekmohammadi and others 2024, section 3.4; Malekmohammadi and others 2025, section 4.
    """
    phases = [(batch_size, num_rounds)]
    if first_batch_size is not None:
        phases = [(first_batch_size, 1), (batch_size, num_rounds - 1)]
    rates, steps = [], []
    for batch, rounds in phases:
        rates.append(np.asarray(batch, np.float64) / np.asarray(num_examples, np.float64))
        steps.append(rounds * _steps(num_examples, batch, accountant != "rdp-classic-64"))
    shape = np.broadcast_shapes(*(x.shape for x in (*rates, *steps)), np.shape(epsilon))
    tables = [
        np.stack([np.broadcast_to(x, shape) for x in each], axis=-1).reshape(*shape or (1,), -1)
        for each in (rates, steps)
    ]
    return calibrate_poisson(epsilon, dp_delta, *tables, accountant=accountant).reshape(shape)


def _steps(num_examples: ArrayLike, batch_size: ArrayLike, rounds_up: bool) -> np.ndarray:
    steps = np.asarray(num_examples, np.float64) / np.asarray(batch_size, np.float64)
    return np.ceil(steps) if rounds_up else steps
