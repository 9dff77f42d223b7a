"""PrivacyFL in compiled rounds: ε on growing digits, own and common ε, alone, n × ε on KDD."""

import csv
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp import FederatedData, algorithms, engine, models
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.data import datasets, full_participation, participation
from fedjax_dp.engine import PrivacyAccounting
from fedjax_dp.io import drawing
from fedjax_dp.server import float_offsets

PAPER = pathlib.Path(__file__).parent / "paper_tables.csv"
# The regulariser that the noise of the source is made for; its training has another. Every step
# brings models nine times closer to the minimum.
REGULARIZER, STEPS, DELTA = 1.0, 10, 1e-5
EPSILONS = (0.1, 1.0, 8.0)
NUM_TEST = 300
# Of the scenarios, as released: noise for a regulariser of 1, and training with another, for so
# many steps that models are large beside it.
RELEASED_REGULARIZER, RELEASED_STEPS = 1e-4, 2000
# Of the grid: algorithm 2 takes one step a round, so that models are carried from round to round.
GRID_REGULARIZER, GRID_STEPS, GRID_ROUNDS = 0.1, 1, 20
# Accuracy has converged once it stays this close to that of training without noise, for so long.
CLOSE, LAST = 0.02, 5


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Loads the digits in their order, levels over 16; the last 300 are for testing."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x, y = (loaded.data / 16).astype(np.float32), loaded.target.astype(np.int32)
    return x[:-NUM_TEST], y[:-NUM_TEST], x[-NUM_TEST:], y[-NUM_TEST:]


def connections(
    loaded: datasets.Dataset, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shuffles connections, and draws 5,000 others for testing."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(loaded.train["y"]))
    test = rng.permutation(len(loaded.test["y"]))[:5000]
    return (
        loaded.train["x"][order],
        loaded.train["y"][order],
        loaded.test["x"][test],
        loaded.test["y"][test],
    )


def simulation_of(
    x: np.ndarray,
    y: np.ndarray,
    sizes: list[int],
    rows_per_round: list[int],
    *,
    method: str = "retrained_averaging",
    regularizer: float = REGULARIZER,
    noise_regularizer: float | None = None,
    num_steps: int = STEPS,
) -> engine.Simulation:
    """Compiles the rounds of clients with consecutive rows, for noise of any scale."""
    clients = np.repeat(np.arange(len(sizes)), sizes)
    owned = len(clients)
    data = FederatedData.from_client_ids({"x": x[:owned], "y": y[:owned]}, clients)
    shape = jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)
    num_classes = int(y.max()) + 1
    model = models.logistic_regression(shape, num_classes, gradient_bound=1.0)
    bounds = models.loss_bounds(model)
    assert bounds is not None
    numbers = LocalConfig(
        learning_rate=2 / (bounds.curvature + 2 * regularizer),
        batch_size=1,
        num_steps=num_steps,
        clip_norm=1.0,
        noise_multiplier=np.zeros(len(sizes), np.float32),
    )
    whole = full_participation()._replace(name="full_batch")
    algorithm = getattr(algorithms, method)(
        model,
        dp_sgd_trainer(model, numbers, sampler=whole),
        num_clients=len(sizes),
        rows_per_round=rows_per_round,
        perturbation=algorithms.OutputPerturbation(
            regularizer,
            calibration="corrected" if noise_regularizer is None else "released",
            noise_regularizer=noise_regularizer,
        ),
    )
    return engine.simulation(algorithm, data, participation(full_participation(), len(sizes)))


def accuracy(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Scores linear models `[..., features, classes]`; a scale of rows changes no answer."""
    kernel, bias = np.asarray(params["kernel"]), np.asarray(params["bias"])
    rows = np.concatenate([x, np.ones_like(x[:, :1])], axis=1)
    stacked = np.concatenate([kernel, bias[..., None, :]], axis=-2)
    # `[examples, ..., classes]` by one product; one for each model is slow.
    found = np.argmax(np.tensordot(rows, stacked, axes=(1, -2)), axis=-1)
    return np.mean(found == y.reshape(-1, *[1] * (found.ndim - 1)), axis=0)


def play(
    sim: engine.Simulation,
    multipliers: np.ndarray,
    num_rounds: int,
    seed: int,
    test: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Plays rounds: accuracy of the shared model, of each received and each own one."""
    hyper = sim.federation.hyper
    noised = hyper.local._replace(noise_multiplier=np.asarray(multipliers, np.float32))
    hyper = hyper._replace(local=noised)
    key = jax.random.key(seed)
    state, records, scores = sim.init(key), [], []
    for _ in range(num_rounds):
        state, record, _ = sim.run(state, key, 1, hyper)
        records.append(record)
        shared, own = jax.device_get((state.server.params, state.clients))
        received = _received(shared, own.noise, float(state.server.num_averaged))
        scores.append(
            {
                "shared": float(accuracy(shared, *test)),
                "received": accuracy(received, *test).tolist(),
                "own": accuracy(own.trained, *test).tolist(),
            }
        )
    found: dict[str, Any] = {"scores": scores, "error_of_offsets": _error_of_offsets(own.sent)}
    if np.all(np.asarray(multipliers) > 0):
        account = PrivacyAccounting(sim, relation="replace_one", hyper=hyper)
        for record in records:
            account.charge(record)
        found["epsilon"] = account.epsilon({"record": DELTA})["record"].tolist()
    return found


def _received(shared: Any, noise: Any, count: float) -> Any:
    """Takes each client's own noise out of the shared model."""
    return jax.tree.map(lambda p, n: p - n / count, shared, noise)


def _error_of_offsets(sent: Any) -> float:
    """Averages the models that clients sent, under legacy offsets, and compares, in float64."""
    flat = np.concatenate([np.reshape(a, (len(a), -1)) for a in jax.tree.leaves(sent)], axis=1)
    flat = flat.astype(np.float64)
    masked = flat + float_offsets(len(flat)).offsets()[:, None]
    return float(np.max(np.abs(masked.mean(axis=0) - flat.mean(axis=0))))


SETTINGS: list[tuple[str, float | None]] = [("none", None)]
SETTINGS += [(noise, epsilon) for noise in ("printed", "corrected") for epsilon in EPSILONS]


def multiplier_of(noise: str, epsilon: float | None, num_clients: int) -> float:
    """Computes the multiplier of an ε: 2/ε under replacement, an n-th of it as printed."""
    if epsilon is None:
        return 0.0
    return 2 / epsilon / (num_clients if noise == "printed" else 1)


def sweep(num_seeds: int) -> list[dict[str, Any]]:
    """Compares ε for 3 clients that get 30 digits more in each of 8 rounds."""
    x, y, *test = digits()
    sim = simulation_of(x, y, [240] * 3, [30] * 3)
    rows = []
    for name, epsilon in SETTINGS:
        multiplier = multiplier_of(name, epsilon, 3)
        seeds = range(num_seeds if multiplier else 1)
        runs = [play(sim, np.full(3, multiplier), 8, seed, (test[0], test[1])) for seed in seeds]
        rows.append({"noise": name, "asked": epsilon, "multiplier": multiplier, **_mean(runs)})
    return rows


def _mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Averages scores over seeds."""
    scores = [
        {name: np.mean([run["scores"][r][name] for run in runs], axis=0).tolist() for name in one}
        for r, one in enumerate(runs[0]["scores"])
    ]
    rest = {k: v for k, v in runs[0].items() if k != "scores"}
    return {"scores": scores, "num_seeds": len(runs), **rest}


def scenarios(num_seeds: int) -> list[dict[str, Any]]:
    """Compares table 5.2's scenarios: 150, 150 and 250 digits, ε of 1, 1 and 0.1."""
    x, y, *test = digits()
    rows = []
    two, three = (
        simulation_of(
            x,
            y,
            sizes,
            sizes,
            regularizer=RELEASED_REGULARIZER,
            noise_regularizer=REGULARIZER,
            num_steps=RELEASED_STEPS,
        )
        for sizes in ([150, 150], [150, 150, 250])
    )
    for scenario, sim, epsilon in (
        (2, two, [1, 1]),
        (3, three, [0.1] * 3),
        (4, three, [1, 1, 0.1]),
    ):
        multipliers = 2 / np.asarray(epsilon)
        runs = [play(sim, multipliers, 1, seed, (test[0], test[1])) for seed in range(num_seeds)]
        found = _mean(runs)
        (last,) = found.pop("scores")
        rows.append({"scenario": scenario, **last, **found})
    return [{"scenario": 1, "received": rows[-1]["own"], "num_seeds": num_seeds}, *rows]


def grid(
    num_clients: list[int], num_seeds: int, num_rounds: int = GRID_ROUNDS
) -> list[dict[str, Any]]:
    """Compares numbers of clients and ε on KDD, 30 new connections a round, by algorithm 2.

    All noise of a number of clients and a seed, which shuffles the rows, is one compiled program.
    """
    loaded = datasets.load("kddcup99", scaling="range", distinct=True)
    rows = []
    for n in num_clients:
        found: list[list[dict[str, Any]]] = []
        for seed in range(num_seeds):
            x, y, *test = connections(loaded, seed)
            sim = simulation_of(
                x,
                y,
                [30 * num_rounds] * n,
                [30] * n,
                method="warm_start_averaging",
                regularizer=GRID_REGULARIZER,
                num_steps=GRID_STEPS,
            )
            scale = [np.full(n, multiplier_of(*setting, n)) for setting in SETTINGS]
            found.append([play(sim, m, num_rounds, seed, (test[0], test[1])) for m in scale])
        for i, (noise, epsilon) in enumerate(SETTINGS):
            runs = [by_setting[i] for by_setting in found]
            curves = _curves(runs)
            rounds = rounds_to_converge(curves, _curves([one[0] for one in found]))
            rows.append(
                {
                    "num_clients": n,
                    "noise": noise,
                    "asked": epsilon,
                    "epsilon": max(runs[0]["epsilon"]) if epsilon else None,
                    "accuracy": np.round(curves.mean(axis=0), 4).tolist(),
                    "own": float(np.mean([np.mean(run["scores"][-1]["own"]) for run in runs])),
                    "rounds_to_converge": rounds,
                }
            )
    return rows


def _curves(runs: list[dict[str, Any]]) -> np.ndarray:
    """Collects the accuracy of shared models, `[seeds, rounds]`."""
    return np.array([[one["shared"] for one in run["scores"]] for run in runs])


def rounds_to_converge(curves: np.ndarray, noiseless: np.ndarray) -> list[int | None]:
    """Finds for each seed the round from which accuracy stays close to that without noise.

    Args:
      curves: accuracy by round, `[seeds, rounds]`.
      noiseless: the same without noise, whose level is the mean of the last rounds.

    Returns:
      Rounds from 1; None for a seed that is not close in each of the last rounds.
    """
    levels = noiseless[:, -LAST:].mean(axis=1, keepdims=True)
    found: list[int | None] = []
    for is_far in curves < levels - CLOSE:
        first = 1 + int(np.max(np.flatnonzero(is_far), initial=-1)) + 1
        found.append(first if first <= curves.shape[1] - LAST + 1 else None)
    return found


def times() -> list[dict[str, Any]]:
    """Computes table 5.3: three cities without computation, and after Singapore has left."""
    cities = engine.latencies(
        places=["Boston", "Singapore", "NYC", "server"],
        seconds=[[0, 5, 0.2, 0.3], [5, 0, 6, 2], [0.2, 6, 0, 0.1], [0.3, 2, 0.1, 0]],
        clients=["Boston", "Singapore", "NYC"],
        server="server",
    )
    free, rows = engine.compute_seconds(3), []
    for iteration, active in ((1, [True] * 3), (2, [True] * 3), (3, [True, False, True])):
        found = engine.round_times(cities, free, active=active).receive
        for city, seconds in zip(("Boston", "Singapore", "NYC"), found, strict=True):
            theirs = printed("simulated_seconds_to_receive", str(iteration))[city]
            ours = None if np.isnan(seconds) else float(seconds)
            rows.append({"iteration": iteration, "city": city, "ours": ours, "paper": theirs})
    return rows


def printed(metric: str, value: str) -> dict[str, str]:
    """Reads the thesis' figures of a metric, by item, for one value of its variable."""
    with PAPER.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == metric]
    return {row["item"]: row["value"] for row in rows if row["variable_value"] == value}


def _cells(values: list[Any]) -> str:
    return " | ".join("" if v is None else v if isinstance(v, str) else f"{v:.3f}" for v in values)


def as_markdown(result: dict[str, Any]) -> str:
    """Writes the tables of those parts that have run."""
    parts = (_sweep_table, _scenario_table, _times_table, _grid_table)
    names = ("sweep", "scenarios", "times", "grid")
    tables = [part(result[n]) for n, part in zip(names, parts, strict=True) if n in result]
    return "\n\n".join("\n".join(lines) for lines in tables) + "\n"


def _table(title: str, columns: str, rows: Iterable[str]) -> list[str]:
    """Writes a title and a table; columns and cells of a row are separated by `|`."""
    line = "|" + "---|" * (columns.count("|") + 1)
    return [f"## {title}", "", f"| {columns} |", line, *(f"| {row} |" for row in rows)]


def _sweep_table(rows: list[dict[str, Any]]) -> list[str]:
    columns = (
        "noise | ε asked | ε of a coordinate | ε composed, δ = 1e-5 | shared, round 1 | 4 | 8 "
        "| received, 8 | own without noise, 8 | seeds | error of legacy offsets"
    )
    lines = []
    for one in rows:
        scores, asked = one["scores"], one["asked"]
        coordinate = f"{2 / one['multiplier']:.3g}" if one["multiplier"] else ""
        composed = rounded_up(max(one["epsilon"]), 3) if "epsilon" in one else ""
        asked = f"{asked:g}" if asked else ""
        curve = [scores[r]["shared"] for r in (0, 3, 7)]
        rest = [float(np.mean(scores[7][name])) for name in ("received", "own")]
        lines.append(
            f"{one['noise']} | {asked} | {coordinate} | {composed} | {_cells([*curve, *rest])} "
            f"| {one['num_seeds']} | {one['error_of_offsets']:.0e}"
        )
    return _table("ε on growing digits (algorithm 3)", columns, lines)


def _scenario_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for one in rows:
        ours = [*one["received"], None][:3]
        theirs = printed("accuracy", str(one["scenario"]))
        cells = [*ours, *(theirs[f"client{i}"] for i in (1, 2, 3))]
        error = f"{one['error_of_offsets']:.0e}" if "error_of_offsets" in one else ""
        lines.append(f"{one['scenario']} | {_cells(cells)} | {one['num_seeds']} | {error}")
    title = "Table 5.2: accuracy of clients 1, 2, 3, ours and the thesis'"
    columns = "scenario | 1 | 2 | 3 | 1, thesis | 2 | 3 | seeds | error of legacy offsets"
    return _table(title, columns, lines)


def _times_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for one in rows:
        ours = "dropped" if one["ours"] is None else f"{one['ours']:.3f}"
        lines.append(f"{one['iteration']} | {one['city']} | {ours} | {one['paper']}")
    title = "Table 5.3: seconds until a client has the new model"
    return _table(title, "iteration | city | ours | thesis", lines)


def _grid_table(rows: list[dict[str, Any]]) -> list[str]:
    columns = (
        "clients | noise | ε asked | ε that holds, δ = 1e-5 | accuracy, round 1 "
        f"| last {LAST} | own without noise, last | rounds to converge | seeds that converge"
    )
    lines = []
    for one in rows:
        asked = f"{one['asked']:g}" if one["asked"] else ""
        held = rounded_up(one["epsilon"], 3) if one["epsilon"] else ""
        curve = [one["accuracy"][0], float(np.mean(one["accuracy"][-LAST:])), one["own"]]
        rounds = [r for r in one["rounds_to_converge"] if r is not None]
        share = f"{len(rounds)} of {len(one['rounds_to_converge'])}"
        middle = f"{np.median(rounds):g}" if rounds else ""
        lines.append(
            f"{one['num_clients']} | {one['noise']} | {asked} | {held} | {_cells(curve)} "
            f"| {middle} | {share}"
        )
    return _table("n × ε on KDD Cup 1999 (algorithm 2)", columns, lines)


def draw(rows: list[dict[str, Any]]) -> Any:
    """Draws accuracy by round, a panel for each noise, with the clients' own models."""
    figure = drawing.new_figure(3.6, drawing.PAGE)
    panels = figure.subplots(1, 2, sharey=True)
    (free,) = [one for one in rows if one["noise"] == "none"]
    rounds = range(1, len(free["scores"]) + 1)
    own = [np.mean(one["own"]) for one in free["scores"]]
    for axes, noise in zip(panels, ("printed", "corrected"), strict=True):
        curves = [one for one in rows if one["noise"] == noise]
        for i, one in enumerate(curves):
            shared = [score["shared"] for score in one["scores"]]
            drawing.draw_curve(axes, i, rounds, shared, f"ε = {one['asked']:g}")
        shared = [score["shared"] for score in free["scores"]]
        drawing.draw_curve(axes, len(curves), rounds, shared, "no noise")
        drawing.draw_curve(axes, len(curves) + 1, rounds, own, "alone")
        axes.set(xlabel="round", ylim=(0, 1))
        drawing.set_title(axes, f"{noise} noise")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("accuracy on 300 digits")
    drawing.legend_below(figure, panels[1], columns=5)
    return figure
