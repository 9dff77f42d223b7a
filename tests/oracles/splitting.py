"""The operator-splitting scheme by hand, from the chapter, in float64 NumPy."""

import numpy as np

FACTORS = {
    "constant": lambda t, period: 1.0,
    "inverse": lambda t, period: 1 / (t + 1),
    "inverse_sqrt": lambda t, period: (t + 1) ** -0.5,
    "inverse_log10": lambda t, period: 1 / (1 + np.log10(t + 1)),
    "inverse_log": lambda t, period: 1 / np.log(t + np.e),
    "exponential": lambda t, period: 0.5 ** (t // period),
}


def scheme(u, weights, cohort, rounds, phi, numbers, *, is_central, eta=lambda t: 1.0):
    """Equations 2.15 to 2.17 with partial participation.

    `phi(r, i, u_i, z̄)` is the client map, `cohort(r)` who joins. Centrally those who sit out keep
    their z_i and all u_i move; else a client's u_i is its own part and the newest z̄'s.
    """
    alpha, beta, gamma = numbers
    u, z, mean, pull = u.copy(), u.copy(), u[0].copy(), 0.0
    average, total = mean.copy(), 0.0
    for r in range(rounds):
        came = [i for i in cohort(r) if weights[i] > 0]
        for i in came:
            here = u[i] if is_central else u[i] + pull * mean
            z[i] = (1 - alpha) * here + alpha * phi(r, i, here, mean)
            if not is_central:
                u[i] = (1 - gamma) * here + gamma * (1 - beta) * z[i]
        if not came:
            continue
        mean = np.average(z[came], axis=0, weights=weights[came])
        pull = gamma * beta
        if is_central:
            u = (1 - gamma) * u + gamma * ((1 - beta) * z + beta * mean)
        total += eta(r)
        average = average + eta(r) / total * (mean - average)
    return {"params": mean, "points": u, "average": average}


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
