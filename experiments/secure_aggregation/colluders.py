"""r² of the attacks on noise in shares, at the noise of the thesis."""

import csv
import pathlib
import statistics
from typing import Any

import numpy as np

from fedjax_dp import audit, privacy
from fedjax_dp.audit.collusion import squared_correlation
from fedjax_dp.io import drawing
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol

ATTACKS = ("non_oblivious", "pooled", "mean", "random", "naive", "diff")
# Those of the thesis, in its order.
DRAWN = ("non_oblivious", "naive", "random", "diff", "mean")
# Weights that are recorded at once.
_BATCH = 250
PAPER = pathlib.Path(__file__).parent / "paper_tables.csv"


def printed() -> dict[str, float]:
    """Reads r² of the thesis: of parties that draw their own noise, and the best on pairs."""
    with PAPER.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "r2_of_attack"]
    return {row["item"]: float(row["value"]) for row in rows}


def noise_for(num_parties: int, r2: float) -> privacy.GammaShares:
    """Chooses the scale at which parties that draw their own noise leak r².

    Of values of variance 1 a Laplace of variance 2·scale² is left: r² = 1/(1 + 2·scale²).
    """
    scale = np.sqrt((1 / r2 - 1) / 2)
    unit = privacy.sensitivity_of_sum(1.0)
    return privacy.gamma_shares(num_parties, unit, float(1 / scale))


def run(num_parties: int, num_trials: int, num_seeds: int) -> dict[str, Any]:
    """Plays the protocol for independent weights, and attacks party 0 in every way, seed by seed.

    The samples are values and estimates of the first seed.
    """
    paper = printed()
    noise = noise_for(num_parties, paper["Non-Oblivious"])
    seeds = [_attacked(noise, num_trials, seed) for seed in range(num_seeds)]
    found = []
    for attack in (*ATTACKS, "server"):
        pairs = [(estimates[attack], values) for values, estimates, _ in seeds]
        one: dict[str, Any] = {
            "attack": attack,
            "r2": [round(squared_correlation(*pair), 5) for pair in pairs],
        }
        if attack != "server":
            one |= {
                "predicted_r2": audit.expected_r2(attack, noise, 1.0),
                "residual_variance": [float(np.var(a - b, ddof=1)) for a, b in pairs],
                "predicted_variance": audit.expected_residual(attack, noise),
            }
        found.append(one)
    return {
        "num_parties": num_parties,
        "num_trials": num_trials,
        "num_seeds": num_seeds,
        "scale": noise.scale,
        "largest_error_of_masks": max(error for _, _, error in seeds),
        "attacks": found,
        "paper": paper,
        "samples": {"values": seeds[0][0], **seeds[0][1]},
    }


def _attacked(
    noise: privacy.GammaShares, num_trials: int, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Attacks one seed: the values of party 0, estimates, and what masks leave in the sum."""
    n = noise.num_parties
    set_up, rng = set_up_protocol(noise, seed), np.random.default_rng(seed)
    estimates: dict[str, list[np.ndarray]] = {attack: [] for attack in (*ATTACKS, "server")}
    truth, errors = [], []
    for first in range(0, num_trials, _BATCH):
        values = rng.normal(size=(n, min(_BATCH, num_trials - first)))
        set_up, iteration = run_iteration(set_up, values, rng)
        set_up, own = run_iteration(set_up, values, rng, is_oblivious=False)
        for attack in ATTACKS:
            attacked = own if attack == "non_oblivious" else iteration
            estimates[attack].append(audit.collude(attacked, attack, rng))
        estimates["server"].append(audit.snoop(iteration))
        truth.append(values[0])
        in_the_clear = (iteration.values + iteration.noise).sum(axis=0)
        errors.append(float(np.max(np.abs(iteration.total - in_the_clear))))
    joined = {attack: np.concatenate(parts) for attack, parts in estimates.items()}
    return np.concatenate(truth), joined, max(errors)


def as_markdown(result: dict[str, Any]) -> str:
    """Writes the table of the attacks."""
    lines = [
        f"{result['num_parties']} parties, {result['num_trials']} weights, {result['num_seeds']} "
        f"seeds, values of variance 1, scale {result['scale']:.4f}; masks change a sum by at most "
        f"{result['largest_error_of_masks']:.0e}",
        "",
        "| attack | r², ours | r², predicted | r², thesis (100 parties) | residual variance "
        "| predicted | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    best = result["paper"]["best attack on oblivious (upper bound)"]
    theirs = {"non_oblivious": f"{result['paper']['Non-Oblivious']}", "mean": f"at most {best}"}
    for one in result["attacks"]:
        predicted = f"{one['predicted_r2']:.3f}" if "predicted_r2" in one else "0"
        variances = "| | | |"
        if "residual_variance" in one:
            ours, closed = statistics.mean(one["residual_variance"]), one["predicted_variance"]
            variances = f"| {ours:.3f} | {closed:.3f} | {ours / closed:.3f} |"
        shown, r2 = theirs.get(one["attack"], ""), statistics.mean(one["r2"])
        spread = f" ± {statistics.stdev(one['r2']):.3f}" if len(one["r2"]) > 1 else ""
        lines.append(f"| {one['attack']} | {r2:.3f}{spread} | {predicted} | {shown} {variances}")
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any]) -> Any:
    """Draws r² by attack: ours, predicted, and those that the thesis prints."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    found = result["attacks"]
    places = np.arange(len(found))
    levels = [statistics.mean(one["r2"]) for one in found]
    axes.bar(places, levels, 0.6, color=drawing.BLUE, label="ours")
    predicted = [one.get("predicted_r2", 0.0) for one in found]
    axes.plot(places, predicted, "k_", markersize=22, label="predicted")
    paper = result["paper"]
    axes.plot([0], [paper["Non-Oblivious"]], "D", color=drawing.RED, label="thesis")
    best = paper["best attack on oblivious (upper bound)"]
    # Of pairs the thesis prints the best of its four attacks alone.
    axes.hlines(best, 1.6, 5.4, color=drawing.RED, linestyle="--", label="thesis, best of four")
    names = [one["attack"].replace("_", "-\n") for one in found]
    axes.set_xticks(places, names)
    axes.tick_params(axis="x", labelsize=8)
    axes.set(xlabel="attack", ylabel="r² of estimates", ylim=(0, 1))
    axes.grid(axis="y", alpha=0.25)
    drawing.legend_above(axes)
    return figure


def draw_estimates(samples: dict[str, np.ndarray]) -> Any:
    """Draws estimates around the values of the honest party, in order, as figure 2-6."""
    figure = drawing.new_figure(2.7, drawing.PAGE)
    panels = figure.subplots(1, len(DRAWN), sharey=True)
    order = np.argsort(samples["values"])
    places = np.arange(len(order))
    for axes, attack in zip(panels, DRAWN, strict=True):
        axes.plot(places, samples[attack][order], ".", color=drawing.BLUE, markersize=1.5)
        axes.plot(places, samples["values"][order], color="black")
        drawing.set_title(axes, attack.replace("_", "-"))
        axes.set_xticks([])
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("weight")
    panels[len(DRAWN) // 2].set_xlabel("iterations by actual weight (black); estimates (blue)")
    return figure


def draw_violins(samples: dict[str, np.ndarray]) -> Any:
    """Draws the distribution of estimate less value by attack, as figure 2-7."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    places = np.arange(len(DRAWN))
    errors = [samples[attack] - samples["values"] for attack in DRAWN]
    parts = axes.violinplot(errors, places, widths=0.8)
    for part in (*parts.pop("bodies"), *parts.values()):
        part.set_color(drawing.BLUE)
    axes.set_xticks(places, [attack.replace("_", "-\n") for attack in DRAWN])
    axes.set(xlabel="attack", ylabel="estimate less actual weight")
    axes.grid(axis="y", alpha=0.25)
    return figure
