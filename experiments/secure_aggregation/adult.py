"""Classification of Adult by thousands of parties that draw rows anew in each round."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit
from sklearn.metrics import matthews_corrcoef

from experiments.secure_aggregation.privacyfl import printed
from fedjax_dp import FederatedData, algorithms, engine, privacy
from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Training
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.data import datasets, full_participation, participation
from fedjax_dp.io import drawing
from fedjax_dp.privacy.sensitivities import Sensitivity
from fedjax_dp.server import oblivious_mean

ROWS, ROUNDS, STEPS = 200, 20, 50
# The printed noise is that of a regulariser of 1.
PRINTED_REGULARIZER = 1.0
# A bound that no model comes near: one record is the unit here, and clipping plays no part.
_NO_CLIPPING = 1e5
# Rows have norm 1 and an intercept of 1 beside it.
_LIPSCHITZ = float(np.sqrt(2))
# Of squared error through the sigmoid, ½(y − σ(z))², by z: the largest slope is at σ = 2/3, and the
# curvature σ²(1 − σ)(2 − 3σ) is least at σ = (15 + √33)/24.
_SLOPE = 4 / 27
_TURN = (15 + 33**0.5) / 24
_LEAST_CURVATURE = _TURN**2 * (1 - _TURN) * (2 - 3 * _TURN)


class Objective(NamedTuple):
    """What a party minimises on its rows, from the last average, by full-batch steps."""

    slope: Callable[[Any, Any], Any]  # Of one row's loss: from σ(z) and the label.
    rate: float
    regularizer: float


def _squared_error(p: Any, y: Any) -> Any:
    return (p - y) * p * (1 - p)


def _log_loss(p: Any, y: Any) -> Any:
    return p - y


# The thesis says that its training is that of Jayaraman and others 2018, which this is. The other
# one has a sensitivity: its loss is convex, and its regulariser above 0.
OBJECTIVES = {
    "published": Objective(_squared_error, 1.0, 0.0),
    "regularized": Objective(_log_loss, 2 / (0.25 * _LIPSCHITZ**2 + 2e-3), 1e-3),
}


class Setting(NamedTuple):
    """The training, and the noise: "printed" or "corrected" for an ε, or none."""

    objective: str
    calibration: str | None = None
    epsilon: float | None = None


def settings(printed: Iterable[float], corrected: Iterable[float]) -> list[Setting]:
    """Lists printed noise beside its training, and corrected noise beside one that allows it."""
    found = []
    for objective, calibration, epsilons in (
        ("published", "printed", list(printed)),
        ("regularized", "corrected", list(corrected)),
    ):
        if epsilons:
            found.append(Setting(objective))
            found += [Setting(objective, calibration, epsilon) for epsilon in epsilons]
    return found


def load(data: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads features over their maxima, rows of norm 1, and an intercept of 1 beside them.

    Of Adult these are people without missing cells and 104 columns that are not constant. Of credit
    card fraud the time is left out, as in the thesis, whose 26 components are 28 in the file.
    """
    options = {"drop_missing": True} if data == "adult" else {}
    loaded = datasets.load(data, scaling="range", **options)
    x = np.concatenate([loaded.train["x"], loaded.test["x"]]).astype(np.float64)
    y = np.concatenate([loaded.train["y"], loaded.test["y"]])
    assert loaded.feature_names is not None
    names = list(loaded.feature_names)
    if data == "adult":
        # The one range that does not begin at 0.
        years = names.index("education-num")
        x[:, years] = 1 + 15 * x[:, years]
    else:
        x = np.delete(x, names.index("Time"), axis=1)
    return rows_of_norm_one(x), y


def rows_of_norm_one(x: np.ndarray) -> np.ndarray:
    """Divides columns by their maxima and rows by their norms, and adds an intercept of 1."""
    x = x[:, np.std(x, axis=0) > 0]
    x = x / np.max(np.abs(x), axis=0)
    # Rounding may not lengthen a row beyond 1, on which the sensitivity rests.
    x = x / (np.linalg.norm(x, axis=1, keepdims=True) * (1 + 1e-6))
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float32)


def split(
    x: np.ndarray, y: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Splits rows at random, 75 to 25, into the pool and the test part."""
    order = np.random.default_rng(seed).permutation(len(x))
    first = 3 * len(x) // 4
    train, test = order[:first], order[first:]
    return x[train], y[train], x[test], y[test]


def sensitivity_of(objective: str) -> Sensitivity:
    """Bounds how far one of a party's 200 records moves the sum of models in a round.

    Squared error through the sigmoid is not convex: a step of rate 1 stretches a distance by at
    most 1 − 2c, for the least curvature c and squared norms of 2, and adds twice the largest slope
    over the number of rows to it.
    """
    if objective == "regularized":
        alpha = OBJECTIVES[objective].regularizer
        return privacy.minimizer_sensitivity(ROWS, alpha, lipschitz=_LIPSCHITZ)
    stretch = 1 - _LIPSCHITZ**2 * _LEAST_CURVATURE
    step = 2 * _SLOPE * _LIPSCHITZ / ROWS
    return Sensitivity(step * (stretch**STEPS - 1) / (stretch - 1), "replace_one")


def shares_of(num_parties: int, setting: Setting) -> privacy.GammaShares:
    """Calibrates noise for one record among a party's 200, ε being that of one coordinate.

    "printed" is the noise of the thesis, for a regulariser of 1 and rows of norm 1; what it is
    worth is said for the training.
    """
    assert setting.epsilon is not None
    sensitivity = sensitivity_of(setting.objective)
    if setting.calibration != "printed":
        return privacy.gamma_shares(num_parties, sensitivity, setting.epsilon)
    claimed = privacy.minimizer_sensitivity(ROWS, PRINTED_REGULARIZER)
    noise = privacy.gamma_shares(num_parties, claimed, setting.epsilon, calibration="paper")
    return noise._replace(sensitivity=sensitivity)


def move_of_one_record(x: np.ndarray, y: np.ndarray, objective: str) -> float:
    """Trains on 200 rows, and with the label of each of them changed: the largest move of a weight.

    One round from zero, float64.
    """
    rows = np.asarray(x[:ROWS], np.float64)
    slope, rate, regularizer = OBJECTIVES[objective]
    labels = np.tile(np.asarray(y[:ROWS], np.float64), (ROWS + 1, 1))
    labels[range(ROWS), range(ROWS)] = 1 - labels[range(ROWS), range(ROWS)]
    w = np.zeros((ROWS + 1, rows.shape[1]))
    for _ in range(STEPS):
        w -= rate * (slope(expit(w @ rows.T), labels) @ rows / ROWS + regularizer * w)
    return float(np.max(np.abs(w[:ROWS] - w[ROWS])))


class _Server(NamedTuple):
    """The last average, and the pool that parties draw from, for one program for all splits."""

    w: jax.Array
    x: jax.Array
    y: jax.Array


def declaration(shape: tuple[int, int], num_parties: int, objective: str) -> FederatedAlgorithm:
    """Declares the rounds: 50 full-batch steps on 200 rows of the pool, then the noised average."""
    size, width = shape
    slope, rate, regularizer = OBJECTIVES[objective]

    def client(message, own, client, hyper, key):
        # Rows are in random order: those at equal distances are a random draw without repetition.
        first, stride = jax.random.split(key)
        first = jax.random.randint(first, (), 0, size)
        stride = jax.random.randint(stride, (), 1, size // ROWS)
        rows = (first + stride * jnp.arange(ROWS)) % size
        a, b = message.x[rows], message.y[rows]

        def step(_, w):
            return w - rate * (slope(jax.nn.sigmoid(a @ w), b) @ a / ROWS + regularizer * w)

        return ClientOutput(jax.lax.fori_loop(0, STEPS, step, message.w), jnp.float32(1), own)

    structure = jax.ShapeDtypeStruct((width,), jnp.float32)
    mean = oblivious_mean(structure, _NO_CLIPPING, 0.0, num_parties)
    shared = algorithms.SharedModel(lambda s: s.w, lambda s, p: s._replace(w=p))
    return FederatedAlgorithm(
        name="adult",
        init=lambda key: _Server(jnp.zeros(width), jnp.zeros(shape), jnp.zeros(size)),
        broadcast=lambda server, client: server,
        client=client,
        aggregator=mean,
        server_step=lambda server, total, hyper, round, key: (server._replace(w=total), {}),
        training=Training(LocalConfig(1.0, 1, 1), lambda size, config: jnp.int32(STEPS)),
        views=algorithms.base.Views(shared),
    )


def federation_of(shape: tuple[int, int], num_parties: int, objective: str) -> engine.Simulation:
    """Compiles the rounds of one number of parties, for a pool of one shape and any noise."""
    empty = {"x": np.zeros((num_parties, 1), np.float32)}
    population = FederatedData(empty, np.arange(num_parties + 1))
    joining = participation(full_participation(), num_parties)
    return engine.simulation(declaration(shape, num_parties, objective), population, joining)


def run(
    sim: engine.Simulation,
    num_parties: int,
    setting: Setting,
    seed: int,
    split: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Plays 20 rounds; MCC on the test part after each, and what the noise costs."""
    x, y, x_test, y_test = split
    noise = None if setting.calibration is None else shares_of(num_parties, setting)
    factor = 0.0 if noise is None else noise.scale / _NO_CLIPPING
    hyper = sim.federation.algorithm.hyper
    hyper = hyper._replace(aggregator={**hyper.aggregator, "noise_multiplier": factor})
    key = jax.random.key(seed)
    state, scores, seconds, cpu_seconds = sim.init(key), [], [], []
    pool = state.server._replace(x=jnp.asarray(x), y=jnp.asarray(y, jnp.float32))
    state = state._replace(server=pool)
    for _ in range(ROUNDS):
        start, cpu_start = time.perf_counter(), time.process_time()
        state, _, _ = sim.run(state, key, 1, hyper)
        w = np.asarray(state.server.w, np.float64)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        scores.append(float(matthews_corrcoef(y_test, x_test @ w > 0)))
    result = {
        **setting._asdict(),
        "num_parties": num_parties,
        "seed": seed,
        "mcc": [round(score, 4) for score in scores],
        "mse": float(np.mean((expit(x_test @ w) - y_test) ** 2)),
        "model_norm": float(np.linalg.norm(w)),
        "weight_variance": float(np.var(w)),
        "first_round_seconds": round(seconds[0], 2),
        "other_rounds_seconds": round(sum(seconds[1:]), 2),
        "other_rounds_cpu_seconds": round(sum(cpu_seconds[1:]), 2),
    }
    if noise is not None:
        result |= {
            "scale": noise.scale,
            "average_noise_stddev": noise.average_stddev,
            "coordinate_epsilon": noise.coordinate_epsilon,
            "round_epsilon": noise.epsilon(x.shape[1]),
            "composed_epsilon": noise.epsilon(x.shape[1], ROUNDS),
            # With rows drawn from one pool, a record is with so many parties at once.
            "expected_holders": num_parties * ROWS / len(x),
        }
    return result


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Writes a table of the last scores, and one of what the printed ε of 5e-4 costs."""
    lines = [
        "| training | parties | ε asked | noise | MCC, round 1 | MCC, last | seeds | thesis "
        "| noise of the average | ε of a coordinate | ε of a round | ε composed "
        "| CPU s without compiling |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (objective, n, calibration, epsilon), runs in _by_setting(results).items():
        cells = [objective, n, "none" if epsilon is None else f"{epsilon:g}", calibration or ""]
        cells += [_in_words([one["mcc"][r] for one in runs]) for r in (0, -1)]
        is_printed = (calibration, epsilon) == ("printed", 1e-5)
        theirs = printed("MCC_out_of_sample_eps_1e-5", str(n))
        cells += [len(runs), theirs.get("", "") if is_printed else ""]
        names = ("average_noise_stddev", "coordinate_epsilon", "round_epsilon", "composed_epsilon")
        cells += [f"{runs[0][name]:.3g}" if name in runs[0] else "" for name in names]
        cells.append(f"{statistics.mean(r['other_rounds_cpu_seconds'] for r in runs):.1f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, *_losses(results)]) + "\n"


def _by_setting(results: list[dict[str, Any]]) -> dict[tuple, list[dict[str, Any]]]:
    """Collects the seeds of a setting, in order of settings and numbers of parties."""

    def key(one: dict[str, Any]) -> tuple:
        return one["objective"], one["num_parties"], one["calibration"], one["epsilon"]

    def place(one: dict[str, Any]) -> tuple:
        return one["objective"], one["num_parties"], -(one["epsilon"] or np.inf), one["seed"]

    return {k: list(v) for k, v in itertools.groupby(sorted(results, key=place), key)}


def _in_words(values: list[float]) -> str:
    """Writes a mean, with the standard deviation over seeds where there are several."""
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _losses(results: list[dict[str, Any]]) -> list[str]:
    """Compares scores under the printed ε of 5e-4 with those without noise, seed by seed."""
    found = {(k[1], k[2], k[3]): v for k, v in _by_setting(results).items() if k[0] == "published"}
    lines = ["", "Relative loss by printed noise, ε = 5e-4, in MCC and in squared error:", ""]
    lines += ["| parties | MCC | thesis | squared error | thesis (2) |", "|---|---|---|---|---|"]
    for (n, calibration, epsilon), runs in found.items():
        free = {one["seed"]: one for one in found.get((n, None, None), [])}
        pairs = [(one, free[one["seed"]]) for one in runs if one["seed"] in free]
        if (calibration, epsilon) == ("printed", 5e-4) and pairs:
            mcc = _in_digits([1 - a["mcc"][-1] / b["mcc"][-1] for a, b in pairs])
            error = _in_digits([a["mse"] / b["mse"] - 1 for a, b in pairs])
            names = (f"relative_{name}_{n}_clients_eps_5e-4" for name in _LOSSES)
            theirs = [printed(name, "").get("", "") for name in names]
            lines.append(f"| {n} | {mcc} | {theirs[0]} | {error} | {theirs[1]} |")
    return lines


_LOSSES = ("MCC_loss", "accuracy_loss_MSE")


def _in_digits(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2g}"
    return f"{mean} ± {statistics.stdev(values):.2g}" if len(values) > 1 else mean


def draw_levels(results: list[dict[str, Any]]) -> Any:
    """Draws the last MCC by printed ε, a curve for each number of parties, as figure 2-4a."""
    figure = drawing.new_figure(3.6)
    axes = figure.subplots()
    found = [(k, v) for k, v in _by_setting(results).items() if k[2] == "printed"]
    for i, n in enumerate(sorted({k[1] for k, _ in found})):
        points = sorted((k[3], [one["mcc"][-1] for one in v]) for k, v in found if k[1] == n)
        x, levels = [e for e, _ in points], [statistics.mean(v) for _, v in points]
        line = drawing.draw_curve(axes, i, x, levels, f"{n:,} parties")
        spread = [statistics.stdev(v) if len(v) > 1 else None for _, v in points]
        drawing.draw_band(axes, line, spread)
    axes.set_xscale("log")
    axes.set_ylabel("Matthews correlation, test part")
    seeds = [len(runs) for _, runs in found]
    drawing.set_lines_below(axes, "printed ε", drawing.words_of_spread(seeds, "band"))
    drawing.finish(axes, "Adult, after the last round")
    return figure


def draw_rounds(results: list[dict[str, Any]], epsilons: Iterable[float | None]) -> Any:
    """Draws MCC by round, a panel for each printed ε, as figure 2-4b; None is without noise."""
    panels = [
        (epsilon, [(k, v) for k, v in _by_setting(results).items() if k[3] == epsilon])
        for epsilon in epsilons
    ]
    figure = drawing.new_figure(3.2, drawing.PAGE)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (epsilon, curves) in zip(grid, panels, strict=True):
        published = [(k, v) for k, v in curves if k[0] == "published"]
        for i, (setting, runs) in enumerate(published):
            curve = np.mean([one["mcc"] for one in runs], axis=0)
            label = f"{setting[1]:,} parties"
            line = drawing.draw_curve(axes, i, range(1, len(curve) + 1), curve, label)
            if len(runs) > 1:
                spread = np.std([one["mcc"] for one in runs], axis=0, ddof=1)
                drawing.draw_band(axes, line, spread.tolist())
        axes.set(xlabel="round", ylim=(-0.15, 0.6))
        drawing.set_title(
            axes, "no noise" if epsilon is None else drawing.with_powers(f"ε = {epsilon:g}")
        )
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("Matthews correlation,\ntest part")
    seeds = [len(runs) for _, curves in panels for _, runs in curves]
    words = "Adult", drawing.words_of_spread(seeds, "bands")
    figure.suptitle(", ".join(filter(None, words)), fontsize=11)
    drawing.legend_below(figure, grid[0], columns=3)
    return figure
