"""Error of the released average by Definition 2, and the seconds of runs by Table A.1's model."""

import csv
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import gammaln

from experiments.secure_aggregation import adult
from experiments.secure_aggregation.colluders import PAPER
from fedjax_dp import engine, privacy
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol
from fedjax_dp.server.secure.key_agreement import pair_seed, public_key_of

# Weights whose noise is averaged.
_WEIGHTS = 4000
_WIDTH = 105
# One-way milliseconds from New York, in round figures; the thesis prints no latencies.
CITIES = {
    "New York": 0.3,
    "London": 35.0,
    "Frankfurt": 41.0,
    "São Paulo": 57.0,
    "Tokyo": 84.0,
    "Mumbai": 96.0,
    "Sydney": 100.0,
    "Singapore": 110.0,
}
# The server is in New York on each map.
MAPS = {"New York": ["New York"], "London": ["London"], "world-wide": list(CITIES)}
PARTS = ("dh_setup", "training", "encryption", "server")


def mean_error(num_parties: int) -> float:
    """Computes E|sum of n Laplace numbers of scale 1|, 2n·C(2n, n)/4ⁿ.

    The sum is a difference of two Gamma(n) numbers.
    """
    n = num_parties
    log_binomial = gammaln(2 * n + 1) - 2 * gammaln(n + 1)
    return float(2 * n * np.exp(log_binomial - 2 * n * np.log(2)))


def measured_error(num_parties: int, seed: int) -> float:
    """Plays the protocol, and measures E|noise of the sum| in units of λ."""
    noise = privacy.gamma_shares(num_parties, privacy.sensitivity_of_sum(1.0), 1.0)
    values = np.zeros((num_parties, _WEIGHTS))
    set_up = set_up_protocol(noise, seed)
    _, iteration = run_iteration(set_up, values, np.random.default_rng(seed), records=False)
    return float(np.mean(np.abs(iteration.total))) / noise.scale


def errors(parties: list[int], seed: int, largest_run: int) -> str:
    """Writes the error of the sum in units of λ/(|W| + 1), by number of parties."""
    lines = [
        "| parties | exact | √(4n/π) | protocol run | claimed by the thesis, n − 1 |",
        "|---|---|---|---|---|",
    ]
    for n in parties:
        found = f"{measured_error(n, seed):.2f}" if n <= largest_run else ""
        asymptotic = np.sqrt(4 * n / np.pi)
        lines.append(f"| {n:,} | {mean_error(n):.2f} | {asymptotic:.2f} | {found} | {n - 1:,} |")
    return "\n".join(lines) + "\n"


def printed() -> dict[int, dict[str, float]]:
    """Reads Table A.1: milliseconds by number of users and part."""
    found: dict[int, dict[str, float]] = {}
    with PAPER.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["source_table"] == "A.1":
                found.setdefault(int(row["variable_value"]), {})[row["item"]] = float(row["value"])
    return found


def measured(num_users: int, seed: int) -> dict[str, float]:
    """Measures the same parts for one party or the server, in milliseconds of the CPU."""
    rng = np.random.default_rng(seed)
    encoding = fixed_point(num_users, integer_bits=15, fraction_bits=32, word_bits=64)
    keys = [rng.bytes(32) for _ in range(51)]
    public = [public_key_of(key) for key in keys]
    agreed = _milliseconds(lambda: [pair_seed(keys[0], p, 0, 1) for p in public[1:]])
    noise = adult.shares_of(2, adult.Setting("regularized", "corrected", 1.0))
    one_pair = set_up_protocol(noise, seed)
    values = np.zeros((2, _WIDTH))
    pairs = 50
    masked = _milliseconds(
        lambda: [run_iteration(one_pair, values, rng, is_oblivious=False) for _ in range(pairs)]
    )
    arrived = [rng.bytes(8 * _WIDTH) for _ in range(num_users)]
    server = _milliseconds(lambda: encoding.decode(_received(arrived)))
    x = rng.normal(size=(adult.ROWS, _WIDTH)) / np.sqrt(_WIDTH)
    y = rng.integers(0, 2, adult.ROWS)
    training = _milliseconds(lambda: _trained(x, y))
    others = num_users - 1
    return {
        "dh_setup": agreed / 50 * others,
        # Both parties of a pair are in one call.
        "encryption": masked / pairs / 2 * others,
        "training": training,
        "server": server,
    }


def _received(messages: list[bytes]) -> np.ndarray:
    """Reads and adds up messages as they come, which is what the thesis times."""
    total = np.zeros(_WIDTH, np.uint64)
    for message in messages:
        total += np.frombuffer(message, np.uint64)
    return total


def _trained(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    w = np.zeros(x.shape[1])
    for _ in range(adult.STEPS):
        w -= 8 * ((1 / (1 + np.exp(-x @ w)) - y) @ x / len(x))
    return w


def _milliseconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Measures CPU milliseconds, the least of some repetitions."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def simulated_seconds(num_users: int, parts: dict[str, float], places: list[str]) -> float:
    """Adds up a run: one agreement of keys, then 20 rounds, on one map of latencies.

    A round lasts until the server has summed the last message; keys pass through the server.
    """
    names = list(CITIES)
    seconds = np.array([[CITIES[a] + CITIES[b] for b in names] for a in names]) / 1e3
    seconds[0], seconds[:, 0] = [np.array(list(CITIES.values())) / 1e3] * 2
    clients = [places[i % len(places)] for i in range(num_users)]
    table = engine.latencies(names, seconds, clients, "New York")
    work = (parts["training"] + parts["encryption"]) / 1e3
    compute = engine.compute_seconds(num_users, per_round=work)
    one = engine.round_times(table, compute, server_seconds=parts["server"] / 1e3)
    keys = engine.compute_seconds(num_users, per_round=parts["dh_setup"] / 1e3)
    set_up = engine.round_times(table, keys)
    return float(np.max(set_up.receive)) + adult.ROUNDS * one.server


def timing(seed: int) -> str:
    """Writes printed parts beside measured ones, and the seconds of runs on three maps."""
    lines = [
        "| users | " + " | ".join(f"{part}, thesis, ours (ms)" for part in PARTS) + " |",
        "|---" * (1 + len(PARTS)) + "|",
    ]
    of_runs = [
        "| users | " + " | ".join(f"{name}, thesis' parts, ours (s)" for name in MAPS) + " |",
        "|---" * (1 + len(MAPS)) + "|",
    ]
    for n, theirs in printed().items():
        ours = measured(n, seed)
        cells = [f"{theirs[part]:g}, {ours[part]:.2g}" for part in PARTS]
        lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
        runs = [
            ", ".join(f"{simulated_seconds(n, parts, places):.1f}" for parts in (theirs, ours))
            for places in MAPS.values()
        ]
        of_runs.append(f"| {n:,} | " + " | ".join(runs) + " |")
    return "\n".join([*lines, "", *of_runs]) + "\n"
