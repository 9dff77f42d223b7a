"""r² of the attacks on noise in shares, at the noise of the thesis."""

import csv
import pathlib
from typing import Any

import numpy as np

from fedjax_dp import audit, privacy
from fedjax_dp.audit.collusion import squared_correlation
from fedjax_dp.io import drawing
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol

ATTACKS = ("non_oblivious", "pooled", "mean", "random", "naive", "diff")
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


def run(num_parties: int, num_trials: int, seed: int) -> dict[str, Any]:
    """Plays the protocol for independent weights, and attacks party 0 in every way."""
    paper = printed()
    noise = noise_for(num_parties, paper["Non-Oblivious"])
    set_up, rng = set_up_protocol(noise, seed), np.random.default_rng(seed)
    estimates: dict[str, list[np.ndarray]] = {attack: [] for attack in (*ATTACKS, "server")}
    truth = []
    for first in range(0, num_trials, _BATCH):
        values = rng.normal(size=(num_parties, min(_BATCH, num_trials - first)))
        set_up, iteration = run_iteration(set_up, values, rng)
        set_up, own = run_iteration(set_up, values, rng, is_oblivious=False)
        for attack in ATTACKS:
            attacked = own if attack == "non_oblivious" else iteration
            estimates[attack].append(audit.collude(attacked, attack, rng))
        estimates["server"].append(audit.snoop(iteration))
        truth.append(values[0])
    values = np.concatenate(truth)
    found = []
    for attack, parts in estimates.items():
        guesses = np.concatenate(parts)
        one = {"attack": attack, "r2": squared_correlation(guesses, values)}
        if attack != "server":
            one |= {
                "predicted_r2": audit.expected_r2(attack, noise, 1.0),
                "residual_variance": float(np.var(guesses - values, ddof=1)),
                "predicted_variance": audit.expected_residual(attack, noise),
            }
        found.append(one)
    return {
        "num_parties": num_parties,
        "num_trials": num_trials,
        "scale": noise.scale,
        "attacks": found,
        "paper": paper,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Writes the table of the attacks."""
    lines = [
        f"{result['num_parties']} parties, {result['num_trials']} weights, values of variance 1, "
        f"scale {result['scale']:.4f}",
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
            ours, closed = one["residual_variance"], one["predicted_variance"]
            variances = f"| {ours:.3f} | {closed:.3f} | {ours / closed:.3f} |"
        shown = theirs.get(one["attack"], "")
        lines.append(f"| {one['attack']} | {one['r2']:.3f} | {predicted} | {shown} {variances}")
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any]) -> Any:
    """Draws r² by attack: ours, predicted, and those that the thesis prints."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    found = result["attacks"]
    places = np.arange(len(found))
    axes.bar(places, [one["r2"] for one in found], 0.6, color=drawing.BLUE, label="ours")
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
