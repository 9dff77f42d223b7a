"""What BLUR and LUS can change of an update, in closed form: NumPy in float64 and nothing else.

    python -m experiments.user_level_dp.limits --output experiments/user_level_dp/results/limits

`README.md` of this folder derives it step by step. Written are `blur.csv`, the bounds at the
paper's settings; `needed.csv`, by how much its table 1 says that BLUR and LUS lengthen the useful
part of a message; `noise.csv`, the noise of a mean by the number of agents; and `checks.csv`, what
the statements of the paper's sections 4 and 5 give on examples. `messages.py` measures the same on
real clients.
"""

import argparse
import csv
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
Array = np.ndarray
Row = dict[str, Any]


class Setting(NamedTuple):
    """What the paper's section 6 states of a data set."""

    name: str
    rate: float
    clip_norm: float
    steps: int = 30


SETTINGS = (Setting("EMNIST", 0.03, 0.03), Setting("CIFAR-10", 0.1, 0.3))
STRENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
SAMPLING, ROUNDS, AGENTS = 0.04, 1000, 3400


class LocalRun(NamedTuple):
    """A client's local training: its update, the gradient of each step, where BLUR pulled."""

    update: Array
    gradients: Array
    is_pulled: Array


def local_run(
    gradient: Callable[[Array, int], Array],
    start: Array,
    rate: float,
    steps: int,
    strength: float = 0.0,
    radius: float = 0.0,
) -> LocalRun:
    """Takes the steps of the paper's (7); `gradient` has the weights and the number of the step."""
    weights, gradients, is_pulled = start.copy(), [], []
    for step in range(steps):
        away = weights - start
        gradients.append(gradient(weights, step))
        is_pulled.append(float(np.linalg.norm(away)) > radius)
        weights = weights - rate * (gradients[-1] + strength * is_pulled[-1] * away)
    return LocalRun(weights - start, np.array(gradients), np.array(is_pulled))


def discounts(is_pulled: Array, rate: float, strength: float) -> Array:
    """Gives the factor of each step's gradient in the update: one for each later pull."""
    later = np.cumsum(is_pulled[::-1])[::-1] - is_pulled
    return (1 - strength * rate) ** later


def printed_discounts(is_pulled: Array, rate: float, strength: float) -> Array:
    """Gives the factors as lemma 2 prints them."""
    steps = np.arange(len(is_pulled))
    return np.where(is_pulled, (1 - strength * rate) ** steps, 1.0)


def clipped(update: Array, clip_norm: float) -> Array:
    return update / max(1.0, float(np.linalg.norm(update)) / clip_norm)


def sparsified(update: Array, gradient: Array, sparsity: float, sizes: Sequence[int]) -> Array:
    """Retains in each layer the share 1 - c of largest |gradient · update|, as LUS does."""
    retained, first = np.zeros_like(update), 0
    for size in sizes:
        part = slice(first, first + size)
        number = max(1, round((1 - sparsity) * size))
        best = np.argsort(-np.abs(gradient[part] * update[part]), kind="stable")[:number]
        retained[part][best] = update[part][best]
        first += size
    return retained


def displacement(curvature: Array, rate: float, steps: int) -> Array:
    """Gives how far steps down a quadratic of gradient 1 and this curvature lead."""
    return rate * np.sum((1 - rate * np.asarray(curvature)) ** np.arange(steps)[:, None], axis=0)


def least_ratio(rate: float, steps: int, strength: float) -> float:
    """Finds the most that a pull shortens on quadratics of curvature 0 to 1 / rate - strength."""
    curvature = np.linspace(0, 1 / rate - strength, 20001)
    pulled = displacement(curvature + strength, rate, steps)
    return float(np.min(pulled / displacement(curvature, rate, steps)))


def turn(least: float) -> float:
    """Gives the largest angle, in degrees, to a sum whose parts are scaled by `least` to 1."""
    return math.degrees(math.acos(2 * math.sqrt(least) / (1 + least)))


def blur_bounds() -> list[Row]:
    """Computes what BLUR can do to an update at each setting of the paper.

    The last two columns are the lengths, in S, of the update of a client whose loss is a straight
    slope of 1.
    """
    rows = []
    for name, rate, clip_norm, steps in SETTINGS:
        for strength in STRENGTHS:
            factor = 1 - strength * rate
            quadratic, steady = least_ratio(rate, steps, strength), factor ** ((steps - 1) / 2)
            least = factor ** (steps - 1)
            plain, pulled = (
                float(
                    local_run(
                        lambda w, _: np.ones(1), np.zeros(1), rate, steps, pull, clip_norm
                    ).update[0]
                )
                / -clip_norm
                for pull in (0.0, strength)
            )
            rows.append(
                {
                    "dataset": name,
                    "strength": strength,
                    "rate": rate,
                    "steps": steps,
                    "clip_norm": clip_norm,
                    "quadratic": quadratic,
                    "quadratic_turn": turn(quadratic),
                    "steady": steady,
                    "any": least,
                    "any_turn": turn(least),
                    "longest_brought_in": 1 / quadratic,
                    "pull_at_clip_norm": strength * clip_norm,
                    "slope_plain": plain,
                    "slope_pulled": pulled,
                }
            )
    return rows


def noise_multipliers(epsilons: Sequence[float]) -> list[float]:
    """Finds the noise multipliers of the paper's table 1."""
    from fedjax_dp.privacy import calibrate_poisson

    found = calibrate_poisson(np.array(epsilons), 1 / AGENTS, SAMPLING, ROUNDS)
    return [float(x) for x in found]


def needed(
    table: Iterable[Mapping[str, str]], multipliers: Callable[[Sequence[float]], Sequence[float]]
) -> list[Row]:
    """Finds how much less noise gives DP-FedAvg the accuracy of BLUR + LUS in table 1.

    Between two budgets accuracy is taken as linear in the logarithm of the noise. `is_least` marks
    what is above DP-FedAvg's best, where only a lower bound can be had.
    """
    rows = [row for row in table if row["source_table"] == "1"]
    epsilons = sorted({float(row["variable_value"]) for row in rows})
    logs = dict(zip(epsilons, np.log(multipliers(epsilons)), strict=True))
    written = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {
            (row["algorithm"], float(row["variable_value"])): float(row["accuracy_mean"])
            for row in rows
            if row["model"] == model
        }
        plain = [of["DP-FedAvg", epsilon] for epsilon in epsilons]
        for epsilon in epsilons:
            both = of["DP-FedAvg+BLUR+LUS", epsilon]
            # Beyond the last budget this is the noise of the last.
            log = float(np.interp(both, plain, [logs[e] for e in epsilons]))
            written.append(
                {
                    "model": model,
                    "epsilon": epsilon,
                    "noise_multiplier": math.exp(logs[epsilon]),
                    "plain": of["DP-FedAvg", epsilon],
                    "both": both,
                    "factor": math.exp(logs[epsilon] - log),
                    "is_least": int(both > plain[-1]),
                }
            )
    return written


def noise_of_means(numbers: Sequence[int] = (4, 16, 64, 256), size: int = 100_000) -> list[Row]:
    """Draws the noise of line 8 of algorithm 1, and of line 10 of algorithm 2, and averages it."""
    rows = []
    for i, algorithm in enumerate(("algorithm 1", "algorithm 2")):
        for agents in numbers:
            rng = np.random.default_rng([i, agents])
            total = sum(rng.normal(0, 1 / math.sqrt(agents), size) for _ in range(agents))
            variance = float(np.var(np.asarray(total) / agents))
            rows.append(
                {"algorithm": algorithm, "agents": agents, "variance": variance}
                | {"closed_form": agents**-2.0}
            )
    return rows


def two_steps() -> tuple[float, float]:
    """Compares (7) with lemma 2 where two steps suffice: gradients 3 and 1, pull 1/2, rate 1."""
    run = local_run(lambda _, step: np.array([3.0 - 2 * step]), np.zeros(1), 1.0, 2, 0.5, 0.1)
    printed = -np.sum(printed_discounts(run.is_pulled, 1.0, 0.5)[:, None] * run.gradients)
    return float(run.update[0]), float(printed)


def lemma_errors(seed: int, size: int = 40) -> tuple[float, float]:
    """Gives the relative errors of the exact discounts and of the printed ones, at EMNIST's."""
    rng = np.random.default_rng(seed)
    rate, strength, steps = 0.03, 0.4, 30
    hessian, slopes = np.diag(rng.uniform(0, 20, size)), rng.normal(size=(steps, size))
    drift = 2 * rng.normal(size=size)
    run = local_run(
        lambda weights, step: hessian @ weights + drift + slopes[step],
        np.zeros(size),
        rate,
        steps,
        strength,
        radius=1.0,
    )
    errors = []
    for factors in (discounts, printed_discounts):
        weights = factors(run.is_pulled, rate, strength)
        told = -rate * weights @ run.gradients
        errors.append(float(np.linalg.norm(told - run.update) / np.linalg.norm(run.update)))
    return errors[0], errors[1]


def deviation(seed: int, size: int = 1000, clip_norm: float = 0.03) -> tuple[float, float, float]:
    """Gives (2)'s first term, in clip norms squared, for updates as they are and cut to S first.

    Cut first, an update arrives at clipping with norm S. Third is the largest change of an entry of
    what is sent, which is one more rounding.
    """
    rng = np.random.default_rng(seed)
    update = 20 * clip_norm / math.sqrt(size) * rng.normal(size=size)
    cut = clipped(update, clip_norm)
    before, after = (max(0.0, float(np.linalg.norm(x)) / clip_norm - 1) ** 2 for x in (update, cut))
    change = np.abs(clipped(cut, clip_norm) - clipped(update, clip_norm)).max()
    return before, after, float(change)


def pulls_within_the_condition(seed: int, size: int = 200) -> int:
    """Counts BLUR's pulls where S is at least η Q G, which corollary 1 asks for."""
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(30, size))
    rate, largest = 0.03, float(np.linalg.norm(gradients, axis=1).max())
    run = local_run(lambda _, q: gradients[q], np.zeros(size), rate, 30, 0.4, rate * 30 * largest)
    return int(run.is_pulled.sum())


def checks() -> list[Row]:
    """Computes what the statements of sections 4 and 5 give on examples."""
    true, printed = two_steps()
    exact, lemma = np.max([lemma_errors(seed) for seed in range(20)], axis=0)
    least = np.min([lemma_errors(seed)[1] for seed in range(20)])
    before, after, change = deviation(0)
    means = noise_of_means()
    logs = {
        name: np.log([(r["agents"], r["variance"]) for r in means if r["algorithm"] == name])
        for name in ("algorithm 1", "algorithm 2")
    }
    powers = {name: np.polyfit(x[:, 0], x[:, 1], 1)[0] for name, x in logs.items()}
    values = {
        "two steps: update": true,
        "two steps: lemma 2": printed,
        "thirty steps: largest error of the exact discounts": exact,
        "thirty steps: least error of lemma 2": least,
        "thirty steps: largest error of lemma 2": lemma,
        "equation 2: first term": before,
        "equation 2: first term when cut first": after,
        "equation 2: change of the message": change,
        "theorem 2: power of P in algorithm 1": powers["algorithm 1"],
        "theorem 2: power of P in algorithm 2": powers["algorithm 2"],
        "corollary 1: pulls": sum(map(pulls_within_the_condition, range(20))),
    }
    return [{"check": name, "value": float(value)} for name, value in values.items()]


def printed_table() -> list[dict[str, str]]:
    with (HERE / "paper_tables.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_csv(rows: Sequence[Row]) -> str:
    lines = [",".join(rows[0])]
    for row in rows:
        values = (f"{x:.6g}" if isinstance(x, float) else str(x) for x in row.values())
        lines.append(",".join(values))
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[], list[Row]]] = {
    "blur": blur_bounds,
    "noise": noise_of_means,
    "checks": checks,
    "needed": lambda: needed(printed_table(), noise_multipliers),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, table in TABLES.items():
        (output / f"{name}.csv").write_text(as_csv(table()), encoding="utf-8")


if __name__ == "__main__":
    main()
