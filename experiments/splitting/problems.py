"""The convex problems of the chapter, from its generators: least squares, logistic regression."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models.base import Model
from fedjax_dp.models.dense import least_squares


class Problem(NamedTuple):
    """A problem whose minimum is known.

    Attributes:
      name: "ls" or "lr".
      data: the clients' examples.
      model: its mean loss over a client's examples is f_i, a sum over the rows of the source.
      gaps: `(points [n, p]) -> [n]`, the objective that the chapter plots, minus its minimum.
      smoothness: the largest L of a client's loss.
      heterogeneity: H with the plain gradient.
    """

    name: str
    data: FederatedData
    model: Model
    gaps: Any
    smoothness: float
    heterogeneity: float


def chapter_rows(
    sigma: float, *, num_clients: int = 25, num_rows: int = 5000, num_features: int = 100
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the chapter's least squares: x0, all A_i, all noises, from seed 100.

    Args:
      sigma: standard deviation of the noise.
      num_clients: clients.
      num_rows: rows of each.
      num_features: unknowns.

    Returns:
      A `[clients, rows, features]` and b `[clients, rows]`, float64.
    """
    draw = np.random.RandomState(100)
    truth = draw.randn(num_features)
    a = np.array([draw.randn(num_rows, num_features) for _ in range(num_clients)])
    return a, np.array([one @ truth + sigma * draw.randn(num_rows) for one in a])


def least_squares_problem(sigma: float, *, in_batches: bool = False) -> Problem:
    """Builds least squares with its origin at the minimum.

    All methods move with the origin. Around the minimum float32 resolves gaps that it could not
    resolve elsewhere. A client's 5,000 rows are replaced by the 100 of the Cholesky factor of AᵀA,
    which have the same loss up to a constant, and so the same steps; batches need the rows.

    Args:
      sigma: standard deviation of the noise.
      in_batches: whether clients have their 5,000 rows, from which batches are drawn.

    Returns:
      The problem; its gap is a sum over clients, as the chapter plots it.
    """
    a, b = chapter_rows(sigma)
    hessians = np.einsum("nmp,nmq->npq", a, a)
    moments = np.einsum("nmp,nm->np", a, b)
    optimum = np.linalg.solve(hessians.sum(axis=0), moments.sum(axis=0))
    slopes = moments - hessians @ optimum
    if in_batches:
        rows, targets = a, b - a @ optimum
    else:
        factors = np.linalg.cholesky(hessians)
        rows = np.swapaxes(factors, 1, 2)
        targets = np.linalg.solve(factors, slopes[..., None])[..., 0]
    _, num_rows, num_features = rows.shape
    clients = [
        {"x": one.astype(np.float32), "y": own.astype(np.float32)}
        for one, own in zip(rows, targets, strict=True)
    ]
    shape = jax.ShapeDtypeStruct((num_features,), jnp.float32)
    start = jnp.asarray(-optimum, jnp.float32)
    model = least_squares(shape, scale=num_rows)._replace(init=lambda key: start)
    whole = hessians.sum(axis=0)

    def gaps(points):
        points = np.asarray(points, np.float64)
        return 0.5 * np.einsum("np,pq,nq->n", points, whole, points)

    return Problem(
        "ls",
        FederatedData.from_clients(clients),
        model,
        gaps,
        float(np.linalg.eigvalsh(hessians)[:, -1].max()),
        float(np.mean(np.sum(slopes**2, axis=1))),
    )


@functools.cache
def problem_of(name: str, sigma: float, *, in_batches: bool = False) -> Problem:
    """Builds each problem once.

    Args:
      name: "ls" or "lr".
      sigma: noise of least squares.
      in_batches: whether local steps of least squares read batches of rows.

    Returns:
      The problem.
    """
    if name == "ls":
        return least_squares_problem(sigma, in_batches=in_batches)
    return logistic_problem()


def logistic_problem(flips: float = 0.257) -> Problem:
    """Builds logistic regression of 10 clients with 1,000 rows and 100 features, from seed 100.

    Labels are ±1 with the chance of a logistic model, then turned round where |flips · N(0, 1)| is
    at least ½. The minimum is found by Newton's method in float64.

    Args:
      flips: σ of the draws that turn labels round.

    Returns:
      The problem; its gap is a mean over clients, as the chapter plots it.
    """
    num_clients, num_rows, num_features = 10, 1000, 100
    ridge = 1 / (num_clients * num_rows)
    draw = np.random.RandomState(100)
    truth = draw.randn(num_features)
    x = draw.randn(num_clients, num_rows, num_features)
    chance = 1 / (1 + np.exp(-x @ truth))
    y = np.where(draw.rand(num_clients, num_rows) < chance, 1.0, -1.0)
    y = np.where(np.abs(flips * draw.randn(num_clients, num_rows)) >= 0.5, -y, y)
    x, y = x.astype(np.float32).astype(np.float64), y
    rows, labels = x.reshape(-1, num_features), y.reshape(-1)

    def values(points):
        margins = labels[:, None] * (rows @ np.asarray(points, np.float64).T)
        norms = np.sum(np.square(points, dtype=np.float64), axis=1)
        return np.logaddexp(0, -margins).sum(axis=0) / num_clients + ridge / 2 * norms

    w = np.zeros(num_features)
    for _ in range(50):
        p = 1 / (1 + np.exp(labels * (rows @ w)))
        gradient = -rows.T @ (labels * p) / num_clients + ridge * w
        curvature = (rows * (p * (1 - p))[:, None]).T @ rows / num_clients
        w = w - np.linalg.solve(curvature + ridge * np.eye(num_features), gradient)
    least = values(w[None])[0]
    p = 1 / (1 + np.exp(y * (x @ w)))
    slopes = -np.einsum("nmp,nm->np", x, y * p) + ridge * w
    largest = max(np.linalg.eigvalsh(one.T @ one)[-1] for one in x) / 4 + ridge

    def apply(params, inputs):
        margins = inputs @ params
        return jnp.stack([margins, jnp.broadcast_to(jnp.sum(params**2), margins.shape)], axis=-1)

    def loss(outputs, batch):
        fit = jnp.logaddexp(0.0, -batch["y"] * outputs[..., 0])
        return num_rows * fit + ridge / 2 * outputs[..., 1]

    clients = [
        {"x": one.astype(np.float32), "y": own.astype(np.float32)}
        for one, own in zip(x, y, strict=True)
    ]
    model = Model.from_functions(
        lambda key: jnp.zeros(num_features), apply, loss=loss, name="ridge_logistic"
    )
    return Problem(
        "lr",
        FederatedData.from_clients(clients),
        model,
        lambda points: values(points) - least,
        float(largest),
        float(np.mean(np.sum(slopes**2, axis=1))),
    )
