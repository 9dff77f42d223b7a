"""Logistic regression on Adult by thousands of parties that draw rows anew in each round."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import matthews_corrcoef

from experiments.secure_aggregation.privacyfl import printed
from fedjax_dp import FederatedData, algorithms, engine, privacy
from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Training
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.data import datasets, full_participation, participation
from fedjax_dp.io import drawing
from fedjax_dp.server import oblivious_mean

ROWS, ROUNDS, STEPS = 200, 20, 50
# The thesis names no regulariser of its training; its noise, by the size that scores stand, is that
# of a regulariser of 1, with which models would predict one class.
REGULARIZER, PRINTED_REGULARIZER = 1e-3, 1.0
# A bound that no model comes near: one record is the unit here, and clipping plays no part.
_NO_CLIPPING = 1e3


def table(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Loads 104 features and an intercept, every row of norm 1, and splits 75 to 25.

    Columns that are constant once people with missing cells are left out are dropped. Means and
    deviations are exact, those of the published training part.
    """
    loaded = datasets.load("adult", scaling="standard", drop_missing=True)
    x = np.concatenate([loaded.train["x"], loaded.test["x"]])
    y = np.concatenate([loaded.train["y"], loaded.test["y"]])
    x = x[:, np.std(x, axis=0) > 0]
    x = np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1)
    # Rounding may not lengthen a row beyond 1, on which the sensitivity rests.
    x = (x / (np.linalg.norm(x, axis=1, keepdims=True) * (1 + 1e-6))).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    first = 3 * len(x) // 4
    train, test = order[:first], order[first:]
    return x[train], y[train], x[test], y[test]


def shares_of(num_parties: int, epsilon: float, calibration: str) -> privacy.GammaShares:
    """Calibrates noise for one record among a party's 200, ε being that of one coordinate.

    "printed" is the noise of the thesis, for a regulariser of 1; what it is worth is said for the
    regulariser of the training.
    """
    sensitivity = privacy.minimizer_sensitivity(ROWS, REGULARIZER)
    if calibration != "printed":
        return privacy.gamma_shares(num_parties, sensitivity, epsilon, calibration=calibration)
    printed = privacy.minimizer_sensitivity(ROWS, PRINTED_REGULARIZER)
    noise = privacy.gamma_shares(num_parties, printed, epsilon, calibration="paper")
    return noise._replace(sensitivity=sensitivity)


def declaration(x: np.ndarray, y: np.ndarray, num_parties: int) -> FederatedAlgorithm:
    """Declares the rounds: 50 full-batch steps on 200 rows of the pool, then the noised average."""
    pool, labels = jnp.asarray(x), jnp.asarray(y, jnp.float32)
    size, width = x.shape
    rate = 2 / (0.25 + 2 * REGULARIZER)

    def client(message, own, client, hyper, key):
        # Rows are in random order: those at equal distances are a random draw without repetition.
        first, stride = jax.random.split(key)
        first = jax.random.randint(first, (), 0, size)
        stride = jax.random.randint(stride, (), 1, size // ROWS)
        rows = (first + stride * jnp.arange(ROWS)) % size
        a, b = pool[rows], labels[rows]

        def step(_, w):
            residual = jax.nn.sigmoid(a @ w) - b
            return w - rate * (residual @ a / ROWS + REGULARIZER * w)

        return ClientOutput(jax.lax.fori_loop(0, STEPS, step, message), jnp.float32(1), own)

    structure = jax.ShapeDtypeStruct((width,), jnp.float32)
    mean = oblivious_mean(structure, _NO_CLIPPING, 0.0, num_parties)
    return FederatedAlgorithm(
        name="adult",
        init=lambda key: jnp.zeros(width),
        broadcast=lambda server, client: server,
        client=client,
        aggregator=mean,
        server_step=lambda server, total, hyper, round, key: (total, {}),
        training=Training(LocalConfig(1.0, 1, 1), lambda size, config: jnp.int32(STEPS)),
        views=algorithms.base.Views(algorithms.SharedModel(lambda s: s, lambda s, p: p)),
    )


def federation_of(x: np.ndarray, y: np.ndarray, num_parties: int) -> engine.Simulation:
    """Compiles the rounds of one number of parties, for noise of any scale."""
    empty = {"x": np.zeros((num_parties, 1), np.float32)}
    population = FederatedData(empty, np.arange(num_parties + 1))
    joining = participation(full_participation(), num_parties)
    return engine.simulation(declaration(x, y, num_parties), population, joining)


def run(
    sim: engine.Simulation,
    num_parties: int,
    setting: tuple[str, float] | None,
    seed: int,
    split: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Plays 20 rounds; MCC on the test part after each, and what the noise costs."""
    x, _, x_test, y_test = split
    noise = None if setting is None else shares_of(num_parties, setting[1], setting[0])
    factor = 0.0 if noise is None else noise.scale / _NO_CLIPPING
    hyper = sim.federation.algorithm.hyper
    hyper = hyper._replace(aggregator={**hyper.aggregator, "noise_multiplier": factor})
    key = jax.random.key(seed)
    state, scores, seconds, cpu_seconds = sim.init(key), [], [], []
    for _ in range(ROUNDS):
        start, cpu_start = time.perf_counter(), time.process_time()
        state, _, _ = sim.run(state, key, 1, hyper)
        w = np.asarray(state.server)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        scores.append(float(matthews_corrcoef(y_test, x_test @ w > 0)))
    result = {
        "num_parties": num_parties,
        "calibration": None if setting is None else setting[0],
        "epsilon": None if setting is None else setting[1],
        "seed": seed,
        "mcc": [round(score, 4) for score in scores],
        "model_norm": float(np.linalg.norm(w)),
        "first_round_seconds": seconds[0],
        "other_rounds_seconds": sum(seconds[1:]),
        "other_rounds_cpu_seconds": sum(cpu_seconds[1:]),
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
        "| parties | ε asked | noise | MCC, round 1 | MCC, last | thesis | noise of the average "
        "| ε of a coordinate | ε of a round | ε composed | s | CPU s without compiling |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        cells = [one["num_parties"], one["epsilon"] or "none", one["calibration"] or ""]
        cells += [f"{one['mcc'][0]:.3f}", f"{one['mcc'][-1]:.3f}"]
        is_printed = (one["calibration"], one["epsilon"]) == ("printed", 1e-5)
        theirs = printed("MCC_out_of_sample_eps_1e-5", str(one["num_parties"]))
        cells.append(theirs.get("", "") if is_printed else "")
        names = ("average_noise_stddev", "coordinate_epsilon", "round_epsilon", "composed_epsilon")
        cells += [f"{one[name]:.3g}" if name in one else "" for name in names]
        cells.append(f"{one['first_round_seconds'] + one['other_rounds_seconds']:.1f}")
        cells.append(f"{one['other_rounds_cpu_seconds']:.1f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, *_losses(results)]) + "\n"


def _losses(results: list[dict[str, Any]]) -> list[str]:
    """Compares MCC under the printed ε of 5e-4 with that without noise."""
    by_setting = {(r["num_parties"], r["calibration"], r["epsilon"]): r for r in results}
    lines = ["", "Relative loss in MCC by printed noise, ε = 5e-4:", ""]
    lines += ["| parties | ours | thesis |", "|---|---|---|"]
    for (n, calibration, epsilon), one in by_setting.items():
        if (calibration, epsilon) == ("printed", 5e-4) and (n, None, None) in by_setting:
            loss = 1 - one["mcc"][-1] / by_setting[n, None, None]["mcc"][-1]
            theirs = printed(f"relative_MCC_loss_{n}_clients_eps_5e-4", "").get("", "")
            lines.append(f"| {n} | {loss:.4f} | {theirs} |")
    return lines


def draw(results: list[dict[str, Any]]) -> Any:
    """Draws MCC by round, a panel for each noise and a curve for each number of parties."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        title = (
            f"{one['calibration']}, ε = {one['epsilon']:g}" if one["calibration"] else "no noise"
        )
        panels.setdefault(title, []).append(one)
    bottom = min(-0.1, *(min(one["mcc"]) - 0.02 for one in results))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    num_lines = -(-len(panels) // columns)
    figure = drawing.new_figure(2.3 * num_lines + 0.6, drawing.PAGE)
    grid = figure.subplots(num_lines, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, runs) in zip(grid.flat, panels.items(), strict=False):
        for i, one in enumerate(runs):
            label = f"{one['num_parties']} parties"
            drawing.draw_curve(axes, i, range(1, len(one["mcc"]) + 1), one["mcc"], label)
        axes.set(xlabel="round", ylim=(bottom, 0.6))
        drawing.set_title(axes, title)
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("MCC on the test part")
    drawing.legend_below(figure, grid.flat[0], columns=3)
    return figure
