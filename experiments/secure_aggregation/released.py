"""PrivacyFL's experiments as its released configuration has them, by scikit-learn's solvers.

Rows are pixels as they are, 0 to 16. Models come from 10 iterations of logistic regression, or from
stochastic gradients. The noise on weights is Laplace noise of scale 2/(n·k·α·ε) for n clients of
at least k rows and α = 1, which is no number of the training; intercepts have none.
"""

import itertools
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, SGDClassifier

from experiments.secure_aggregation import privacyfl
from fedjax_dp.data import datasets
from fedjax_dp.io import drawing

# Of the released configuration: the regulariser of the noise, and iterations of training.
ALPHA, ITERATIONS = 1.0, 10
SIZES = (150, 150, 250)
# Rows that a client gets in each iteration: figures 5-2 and 5-4.
NEW_ROWS, GROWING_ITERATIONS, SERVERLESS_ITERATIONS = 30, 8, 7
CLIENTS = 3
Rows = tuple[np.ndarray, np.ndarray]


class Linear(NamedTuple):
    """A linear model of `[classes, features]`, or of one output for two classes."""

    weights: np.ndarray
    intercepts: np.ndarray

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Scores answers."""
        outputs = x @ self.weights.T + self.intercepts
        answers = outputs[:, 0] > 0 if outputs.shape[1] == 1 else np.argmax(outputs, axis=1)
        return float(np.mean(answers == y))


def digits() -> tuple[Rows, Rows]:
    """Loads the digits in their order, levels from 0 to 16; the last 300 are for testing."""
    x, y, x_test, y_test = privacyfl.digits()
    return (16 * x.astype(np.float64), y), (16 * x_test.astype(np.float64), y_test)


def logistic(rows: Rows) -> Linear:
    """Takes ten iterations of scikit-learn's logistic regression, from zero."""
    with warnings.catch_warnings():
        # It stops before convergence, as in the source.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = LogisticRegression(max_iter=ITERATIONS).fit(*rows)
    return Linear(found.coef_, found.intercept_)


def stochastic(rows: Rows, seed: int, start: Linear | None = None) -> Linear:
    """Trains by stochastic gradients of the log loss, from zero or a model."""
    solver = SGDClassifier(loss="log_loss", alpha=1e-4, random_state=seed)
    if start is None:
        found = solver.fit(*rows)
    else:
        # It trains in place, and others start from the same model.
        weights, intercepts = start.weights.copy(), start.intercepts.copy()
        found = solver.fit(*rows, coef_init=weights, intercept_init=intercepts)
    return Linear(found.coef_, found.intercept_)


def scale_of(num_clients: int, smallest: int, epsilon: float) -> float:
    """Computes the printed scale of a client's noise."""
    return 2 / (num_clients * smallest * ALPHA * epsilon)


def mean(models: Sequence[Linear]) -> Linear:
    """Averages models."""
    weights, intercepts = zip(*models, strict=True)
    return Linear(np.mean(weights, axis=0), np.mean(intercepts, axis=0))


def noised(models: Sequence[Linear], noise: Sequence[np.ndarray]) -> list[Linear]:
    """Adds each client's noise to its weights."""
    return [Linear(m.weights + z, m.intercepts) for m, z in zip(models, noise, strict=True)]


def scenarios(num_seeds: int) -> list[dict[str, Any]]:
    """Runs table 5.2: what each client scores with the mean less its own noise, by scenario."""
    (x, y), test = digits()
    ends = np.cumsum(SIZES)
    models = [logistic((x[b - n : b], y[b - n : b])) for n, b in zip(SIZES, ends, strict=True)]
    rows: list[dict[str, Any]] = [
        {"scenario": 1, "seed": 0, "client": c + 1, "accuracy": model.accuracy(*test)}
        for c, model in enumerate(models)
    ]
    wanted = {2: (1.0, 1.0), 3: (0.1, 0.1, 0.1), 4: (1.0, 1.0, 0.1)}
    for (scenario, epsilons), seed in itertools.product(wanted.items(), range(num_seeds)):
        rng, n = np.random.default_rng((seed, scenario)), len(epsilons)
        scales = [scale_of(n, min(SIZES[:n]), epsilon) for epsilon in epsilons]
        noise = [rng.laplace(0, scale, models[0].weights.shape) for scale in scales]
        shared = mean(noised(models[:n], noise))
        for c, own in enumerate(noise):
            score = shared._replace(weights=shared.weights - own / n).accuracy(*test)
            rows.append({"scenario": scenario, "seed": seed, "client": c + 1, "accuracy": score})
    return rows


def _cumulative(train: Rows, client: int, iteration: int, iterations: int) -> Rows:
    """Takes a client's consecutive rows up to an iteration."""
    first = client * iterations * NEW_ROWS
    part = slice(first, first + iteration * NEW_ROWS)
    return train[0][part], train[1][part]


def growing(num_seeds: int) -> list[dict[str, Any]]:
    """Runs figure 5-2: the shared model, and the mean of the clients' own without noise."""
    train, test = digits()
    rows = []
    for iteration in range(1, GROWING_ITERATIONS + 1):
        models = [
            logistic(_cumulative(train, c, iteration, GROWING_ITERATIONS)) for c in range(CLIENTS)
        ]
        own = float(np.mean([model.accuracy(*test) for model in models]))
        for epsilon, seed in itertools.product(privacyfl.EPSILONS, range(num_seeds)):
            rng = np.random.default_rng((seed, iteration))
            scale = scale_of(CLIENTS, iteration * NEW_ROWS, epsilon)
            noise = [rng.laplace(0, scale, models[0].weights.shape) for _ in models]
            one = {"epsilon": epsilon, "seed": seed, "iteration": iteration, "own": own}
            rows.append({**one, "shared": mean(noised(models, noise)).accuracy(*test)})
    return rows


def serverless(num_seeds: int) -> list[dict[str, Any]]:
    """Runs figure 5-4: models from stochastic gradients, averaged without noise."""
    train, test = digits()
    rows = []
    for seed, iteration in itertools.product(range(num_seeds), range(1, SERVERLESS_ITERATIONS + 1)):
        seeds = np.random.default_rng((seed, iteration)).integers(0, 1_000_000, CLIENTS)
        models = [
            stochastic(_cumulative(train, c, iteration, SERVERLESS_ITERATIONS), int(seeds[c]))
            for c in range(CLIENTS)
        ]
        one = {"seed": seed, "iteration": iteration, "federated": mean(models).accuracy(*test)}
        rows.append(one | {f"own_{c + 1}": m.accuracy(*test) for c, m in enumerate(models)})
    return rows


def grid(num_seeds: int, num_clients: Sequence[int] = (3, 10, 30, 100)) -> list[dict[str, Any]]:
    """Runs figure 5-3: algorithm 2 on KDD, stochastic gradients on 30 new rows from the mean."""
    loaded = datasets.load("kddcup99", scaling="range", distinct=True)
    rows = []
    for seed in range(num_seeds):
        x, y, *test = privacyfl.connections(loaded, seed)
        for n, epsilon in itertools.product(num_clients, (*privacyfl.EPSILONS, None)):
            rng = np.random.default_rng(seed)
            shared: Linear | None = None
            for iteration in range(privacyfl.GRID_ROUNDS):
                firsts = [(c * privacyfl.GRID_ROUNDS + iteration) * NEW_ROWS for c in range(n)]
                models = [
                    _started(x[a : a + NEW_ROWS], y[a : a + NEW_ROWS], rng, shared) for a in firsts
                ]
                if epsilon is not None:
                    scale = scale_of(n, NEW_ROWS, epsilon)
                    noise = [rng.laplace(0, scale, m.weights.shape) for m in models]
                    models = noised(models, noise)
                shared = mean(models)
                one = {"clients": n, "epsilon": epsilon, "seed": seed, "iteration": iteration + 1}
                rows.append({**one, "accuracy": shared.accuracy(*test)})
    return rows


def _started(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, start: Linear | None
) -> Linear:
    """Trains on new rows from the shared model, which stays where they are of one class."""
    seed = int(rng.integers(0, 1_000_000))
    if len(np.unique(y)) == 1:
        return start or Linear(np.zeros((1, x.shape[1])), np.zeros(1))
    return stochastic((x, y), seed, start)


def moves() -> list[dict[str, Any]]:
    """Changes one label of client 1 of table 5.2 at a time: the largest move of a weight.

    The noise is for models of 150 rows of which a record moves a weight by 2/(150·α) at most.
    """
    (x, y), _ = digits()
    x, y = x[: SIZES[0]], y[: SIZES[0]]
    base, rows = logistic((x, y)), []
    for i in range(len(y)):
        other = logistic((x, np.where(np.arange(len(y)) == i, (y + 1) % 10, y)))
        move = float(np.max(np.abs(other.weights - base.weights)))
        rows.append({"record": i, "move": move, "bound": 2 / (len(y) * ALPHA)})
    return rows


class Part(NamedTuple):
    """A file of results: what makes its rows of a number of seeds, and how many show the spread."""

    rows: Callable[..., list[dict[str, Any]]]
    seeds: int


PARTS = {
    "scenarios": Part(scenarios, 100),
    "growing": Part(growing, 100),
    "serverless": Part(serverless, 640),
    "grid": Part(grid, 20),
    "moves": Part(lambda seeds: moves(), 1),
}


def draw(grown: list[dict[str, Any]], alone: list[dict[str, Any]]) -> Any:
    """Draws figures 5-2 and 5-4: accuracy by iteration, with one standard deviation."""
    figure = drawing.new_figure(3.4, drawing.PAGE)
    left, right = figure.subplots(1, 2, sharey=True)
    for i, epsilon in enumerate(privacyfl.EPSILONS):
        part = [row for row in grown if row["epsilon"] == epsilon]
        _draw_curve(left, i, part, "shared", f"shared, ε = {epsilon:g}")
    _draw_curve(left, 3, grown, "own", "clients' mean")
    _draw_curve(right, 0, alone, "federated", "federated, no noise")
    for c in range(CLIENTS):
        _draw_curve(right, 1 + c, alone, f"own_{c + 1}", f"client {c + 1}")
    seeds = [len({row["seed"] for row in rows}) for rows in (grown, alone)]
    for axes, title in ((left, "With a server (figure 5-2)"), (right, "Without one (figure 5-4)")):
        axes.set_ylim(0, 1)
        drawing.set_lines_below(axes, "iteration", drawing.words_of_spread(seeds, "bands"))
        drawing.finish(axes, title)
        drawing.integer_ticks(axes)
    left.set_ylabel("accuracy on 300 digits")
    return figure


def _draw_curve(axes: Any, index: int, rows: list[dict[str, Any]], name: str, label: str) -> None:
    iterations = sorted({row["iteration"] for row in rows})
    values = [[row[name] for row in rows if row["iteration"] == i] for i in iterations]
    line = drawing.draw_curve(axes, index, iterations, [statistics.mean(v) for v in values], label)
    drawing.draw_band(axes, line, [statistics.stdev(v) if len(v) > 1 else None for v in values])
