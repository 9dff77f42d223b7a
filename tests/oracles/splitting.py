"""Operator splitting in float64 NumPy, from equations (2.15) to (2.17) alone, and closed forms.

`splitting` was written from the equations and follows no other program, but for one choice that the
equations leave open and that it shares with the package: the numbers of a client that waits, see
`waits`. One round is

    z_i ← (1 − α) u_i + α Φ_i(u_i)          clients of the cohort S; others hold their last z_i
    z̄  ← Σ_S π_i z_i / Σ_S π_i             the model; a cohort without weight changes nothing
    θ_i ← (1 − β) z_i + β z̄
    u_i ← (1 − γ) u_i + γ θ_i

A client that has not taken part yet holds z_i = u_i = θ0, the start of all.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

# (round, client, its point, the newest model) -> point.
ClientMap = Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]

# Table 2.1 and the two settings of (2.12) and (2.13): the client map, α, β, γ.
SETTINGS = {
    "fedavg": ("gradient", 1.0, 1.0, 1.0),
    "fedprox": ("prox", 1.0, 1.0, 1.0),
    "fedsplit": ("prox", 2.0, 2.0, 1.0),
    "fedpi": ("prox", 2.0, 2.0, 0.5),
    "fedrp": ("prox", 2.0, 1.0, 1.0),
    "reflected_fedavg": ("gradient", 1.0, 2.0, 1.0),
    "reflected_fedprox": ("prox", 1.0, 2.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Models z̄ `[rounds, p]`; where clients begin next, and whether they took part, `[clients]`."""

    models: np.ndarray
    points: np.ndarray
    joined: np.ndarray


def splitting(
    client_map: ClientMap,
    start: np.ndarray,
    weights: np.ndarray,
    cohorts: Sequence[Sequence[int]],
    numbers: Sequence[Sequence[float]],
    *,
    waits: bool = False,
) -> Trajectory:
    """Runs one round a cohort; `numbers` are (α, β, γ), each with one value a round.

    All clients update θ_i and u_i in every round. Where absent clients wait, each updates them
    once, when it takes part again, with the newest z̄ and the numbers of its own last round; of
    this round where it has had none.
    """
    alpha, beta, gamma = (np.broadcast_to(n, len(cohorts)) for n in numbers)
    num_clients = len(weights)
    u = np.tile(np.asarray(start, float), (num_clients, 1))
    z, mean = u.copy(), u[0].copy()
    last = np.full(num_clients, -1)
    models = []

    def updated(i, t):
        theta = (1 - beta[t]) * z[i] + beta[t] * mean
        return (1 - gamma[t]) * u[i] + gamma[t] * theta

    def resumed(i, t):
        """Where a client that waited begins round t."""
        return updated(i, last[i] if last[i] >= 0 else t)

    for t, cohort in enumerate(cohorts):
        cohort = [i for i in cohort if weights[i] > 0]
        for i in cohort:
            if waits:
                u[i] = resumed(i, t)
            z[i] = (1 - alpha[t]) * u[i] + alpha[t] * client_map(t, i, u[i], mean)
            last[i] = t
        if cohort:
            mean = np.average(z[cohort], axis=0, weights=weights[cohort])
            if not waits:
                u = np.array([updated(i, t) for i in range(num_clients)])
        models.append(mean)
    if waits:
        u = np.array([resumed(i, -1) for i in range(num_clients)])
    return Trajectory(np.array(models), u, last >= 0)


def ergodic(start, models, step_sizes, counts):
    """θ̄ = Σ η_s θ_s / Σ η_s over the rounds that count; the start where none does."""
    weights = np.asarray(step_sizes, float) * np.asarray(counts, float)
    return np.average(models, axis=0, weights=weights) if weights.sum() > 0 else start


def accelerated_descent(gradient, start, rate, memory, steps):
    """Anderson's mix of plain steps by differences: least squares in c for g − ΔG c."""
    x, images, gradients = np.asarray(start, float), [], []
    for _ in range(steps):
        gradients = [*gradients, gradient(x)][-memory - 1 :]
        images = [*images, x - rate * gradients[-1]][-memory - 1 :]
        newest, x = gradients[-1], images[-1]
        if len(images) > 1:
            away = np.array([newest - g for g in gradients[:-1]]).T
            c, *_ = np.linalg.lstsq(away, newest, rcond=None)
            x = x - np.array([x - image for image in images[:-1]]).T @ c
        yield x


@dataclasses.dataclass(frozen=True)
class Quadratics:
    """Clients f_i(x) = ½ xᵀ H_i x − c_iᵀ x; without data both are zero."""

    hessians: np.ndarray
    linear: np.ndarray

    @classmethod
    def of_rows(cls, pairs):
        """The mean of ½ (aᵀx − b)² over each client's rows `(A_i, b_i)`."""
        sizes = [max(len(b), 1) for _, b in pairs]
        hessians = [a.T @ a / n for (a, _), n in zip(pairs, sizes, strict=True)]
        linear = [a.T @ b / n for (a, b), n in zip(pairs, sizes, strict=True)]
        return cls(np.array(hessians, float), np.array(linear, float))

    def gradient(self, i, x):
        return self.hessians[i] @ x - self.linear[i]

    def gradient_steps(self, k: int, eta: float) -> ClientMap:
        """G^k: k gradient steps, nothing averaged in between."""

        def phi(t, i, u, mean):
            for _ in range(k):
                u = u - eta * self.gradient(i, u)
            return u

        return phi

    def proximal(self, eta: float) -> ClientMap:
        """P_η(v) = (H_i + I/η)⁻¹ (c_i + v/η)."""
        eye = np.eye(self.linear.shape[1]) / eta
        return lambda t, i, u, mean: np.linalg.solve(
            self.hessians[i] + eye, self.linear[i] + u / eta
        )

    def inner_steps(self, k: int, rate: float, eta: float) -> ClientMap:
        """k steps from the newest model along −∇ (f_i(x) + ‖x − v‖² / (2 η))."""

        def phi(t, i, u, mean):
            x = mean
            for _ in range(k):
                x = x - rate * (self.gradient(i, x) + (x - u) / eta)
            return x

        return phi


class LeastSquares:
    """Clients with the losses ½‖A_i θ − b_i‖², by H_i = AᵀA and c_i = Aᵀb; float64."""

    def __init__(self, a, b, weights=None):
        a, b = np.asarray(a, float), np.asarray(b, float)
        self.h = np.einsum("nmp,nmq->npq", a, a)
        self.c = np.einsum("nmp,nm->np", a, b)
        n = len(a)
        self.weights = np.full(n, 1 / n) if weights is None else np.asarray(weights, float)
        self.optimum = np.linalg.solve(self._mean(self.h), self._mean(self.c))

    def _mean(self, by_client):
        return np.tensordot(self.weights, by_client, axes=1)

    def gap(self, theta):
        """Σ_i ½‖A_i θ − b_i‖² minus its minimum: a sum over clients."""
        away = np.asarray(theta, float) - self.optimum
        return 0.5 * away @ self.h.sum(axis=0) @ away

    def gradients(self, theta):
        return self.h @ theta - self.c

    def prox(self, u, eta):
        """All clients' exact proximal steps, `[clients, p]`."""
        eye = np.eye(self.h.shape[1])
        return np.linalg.solve(self.h + eye / eta, (self.c + u / eta)[..., None])[..., 0]

    def steps(self, u, eta, k):
        """All clients' k gradient steps."""
        for _ in range(k):
            u = u - eta * (np.einsum("npq,nq->np", self.h, u) - self.c)
        return u

    def fedavg_limit(self, eta, k):
        """θ_k = [Σ π H S]⁻¹ [Σ π S c] with S = (1/k) Σ_{j<k} (I − ηH)^j."""
        eye, s = np.eye(self.h.shape[1]), 0.0
        for j in range(k):
            s = s + np.linalg.matrix_power(eye - eta * self.h, j) / k
        left, right = self.h @ s, np.einsum("npq,nq->np", s, self.c)
        return np.linalg.solve(self._mean(left), self._mean(right))

    def fedprox_limit(self, eta):
        """θ = [Σ π (I − Q)]⁻¹ [Σ π η Q c] with Q = (I + ηH)⁻¹; FedRP's too."""
        eye = np.eye(self.h.shape[1])
        q = np.linalg.inv(eye + eta * self.h)
        right = eta * np.einsum("npq,nq->np", q, self.c)
        return np.linalg.solve(self._mean(eye - q), self._mean(right))


def chapter_data(sigma, *, num_clients=25, num_rows=5000, num_features=100, seed=100):
    """The chapter's generator: x0, then all A_i, then all noises, of NumPy's legacy generator."""
    draw = np.random.RandomState(seed)
    truth = draw.randn(num_features)
    a = [draw.randn(num_rows, num_features) for _ in range(num_clients)]
    b = [one @ truth + sigma * draw.randn(num_rows) for one in a]
    return np.array(a), np.array(b)
