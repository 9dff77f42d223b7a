"""Runs an experiment: rounds, looks from outside, a run folder that can be resumed."""

import pathlib
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from rich.console import Console

from fedjax_dp.cli import config as configuration
from fedjax_dp.cli.assemble import Experiment, assemble
from fedjax_dp.cli.config import Config, ConfigError
from fedjax_dp.cli.progress import Progress
from fedjax_dp.core import checks
from fedjax_dp.core.keys import secret_key
from fedjax_dp.data.statistics import draw as draw_partition
from fedjax_dp.engine.accounting import PrivacyAccounting
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.fairness import summarize
from fedjax_dp.io import plots
from fedjax_dp.io.checkpoint import ROOT_FILE, Checkpoints
from fedjax_dp.io.logbook import Logbook, read_metrics, write_json, write_text
from fedjax_dp.io.statement import write_statement

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"


def require_free(output: pathlib.Path) -> None:
    """Requires that a folder asked for holds nothing yet.

    Args:
      output: the folder.

    Raises:
      ConfigError: if it is a file or holds something.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "to go on with a run use --resume"
        )


def _next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each."""
    number = 1
    while True:
        folder = pathlib.Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def run(
    config: Config, folder: pathlib.Path | None, console: Console, *, resume: bool = False
) -> int:
    """Runs an experiment to its end, or to an interruption, and writes its folder.

    Args:
      config: the experiment.
      folder: the run folder, the next free one under `runs/` where it is None; the folder of an
        interrupted run where `resume` is set.
      console: where progress goes.
      resume: go on from the newest checkpoint.

    Returns:
      The exit status: 0 at the end, 130 after an interruption.

    Raises:
      ValueError: for what `assemble` refuses, a privacy that cannot be accounted, or a run that was
        started with another configuration.
    """
    started = time.perf_counter()
    if config.execution.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.execution.compilation_cache)
    with Progress(console, config.run.rounds) as progress:
        progress.phase("reading data and calibrating noise")
        experiment = assemble(config)
        config, simulation = experiment.config, experiment.simulation
        state = simulation.init(jax.random.key(config.run.seed))
        seconds_before, ledgers = 0.0, None
        if resume and folder is not None:
            checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=config.run.secret)
            key = _kept_root(config, checkpoints)
            if checkpoints.latest_round() is not None:
                state, extra = checkpoints.restore(state)
                _require_same(config, extra["config"])
                ledgers, seconds_before = extra["ledgers"], extra["seconds"]
        # The state that runs holds the noise that is accounted: after a restart, the saved one.
        accounting = PrivacyAccounting(
            simulation, state, config.privacy.relation, config.privacy.accountant
        )
        if ledgers is not None:
            accounting.restore(ledgers)
        if folder is None:
            folder = _next_folder(config.run.name)
        if not resume:
            checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, is_secret=config.run.secret)
            key = new_root(config)
            if config.run.secret:
                # On the disk before the first round, so that no round is released with two noises.
                checkpoints.keep_root(jax.random.key_data(key))
            write_text(folder / CONFIG_FILE, configuration.to_toml(config))
        logbook = Logbook(folder, from_round=int(state.round))

        progress.phase("compiling")
        compiling = time.perf_counter()
        state = simulation.compile(state, key)
        jax.block_until_ready(state)
        seconds_compiling = time.perf_counter() - compiling

        def save(state: SimulationState) -> None:
            seconds = seconds_before + time.perf_counter() - started
            extra = {"ledgers": accounting.to_json(), "seconds": seconds}
            checkpoints.save(state, extra | {"config": configuration.to_toml(config)})

        if config.run.secret:
            # From round 0 on, so that no two configurations ever share a root.
            save(state)
        with _interruptions() as is_interrupted:
            state, is_over_budget = _rounds(
                experiment, state, key, accounting, logbook, progress, save, is_interrupted
            )
            interrupted = is_interrupted() and int(state.round) < config.run.rounds
        save(state)
        logbook.close()
        checkpoints.close()
        progress.phase("evaluating and drawing")
        seconds = seconds_before + time.perf_counter() - started
        timing = {"seconds": seconds, "seconds_compiling": seconds_compiling}
        summary = _finish(experiment, state, accounting, folder, timing)
    _report(console, summary, folder, interrupted, is_over_budget)
    return 130 if interrupted else 0


def new_root(config: Config) -> PRNGKey:
    """Gives the root of cohorts, batches and noise of a run that starts.

    The seed alone decides over data and initial model, so that secret runs compare.

    Args:
      config: the experiment.

    Returns:
      The key of the seed, or a fresh one of the operating system.
    """
    return secret_key() if config.run.secret else jax.random.key(config.run.seed)


def _kept_root(config: Config, checkpoints: Checkpoints) -> PRNGKey:
    """Gives the root of a run that goes on; refuses one that has lost it."""
    root = checkpoints.root()
    if not config.run.secret:
        rule = "be true as when the run started"
        checks.require(root is None, "run.secret", rule, config.run.secret)
        return jax.random.key(config.run.seed)
    if root is None:
        raise ValueError(
            f"{checkpoints.directory / ROOT_FILE} must be there for a secret run to go on: without "
            "it, rounds that were released would get fresh noise; nearest valid choice: a new run "
            "in another folder"
        )
    return jax.random.wrap_key_data(jnp.asarray(root))


def _require_same(config: Config, saved: str) -> None:
    """Requires the configuration that a checkpoint was written under, but for how it executes."""
    now, then = (tomllib.loads(text) for text in (configuration.to_toml(config), saved))
    for tables in (now, then):
        tables.pop("execution")
    checks.require(
        now == then,
        CONFIG_FILE,
        "be as it was when the run started; only [execution] may change",
        {name: table for name, table in now.items() if table != then.get(name)},
    )


def _rounds(
    experiment: Experiment,
    state: SimulationState,
    key: Any,
    accounting: PrivacyAccounting,
    logbook: Logbook,
    progress: Progress,
    save: Callable[[SimulationState], None],
    is_interrupted: Callable[[], bool],
) -> tuple[SimulationState, bool]:
    """Runs blocks of rounds up to the next look from outside, until the end or the budget."""
    config = experiment.config
    done, total = int(state.round), config.run.rounds

    def affordable() -> int:
        return accounting.affordable_rounds(
            state,
            key,
            total - done,
            experiment.budget,
            experiment.dp_delta,
            config.privacy.accountant,
        )

    # Asked again only where it is used up: if not everybody was drawn, there is more.
    allowed = affordable()
    progress.done(done)
    while done < total and not is_interrupted():
        if allowed == 0:
            return state, True
        stops = (config.run.evaluate_every, config.run.checkpoint_every)
        block = min(allowed, *(every - done % every for every in stops))
        state, info = experiment.simulation.run(state, key, block)
        rows = _rows(experiment, accounting, info, state, done)
        done, allowed = done + block, allowed - block
        if allowed == 0:
            allowed = affordable()
        if allowed == 0 or done % config.run.evaluate_every == 0:
            rows[-1] |= _evaluate(experiment, state)
        for row in rows:
            logbook.write(row)
        progress.done(done, rows[-1])
        if done % config.run.checkpoint_every == 0:
            save(state)
    return state, False


def _rows(
    experiment: Experiment,
    accounting: PrivacyAccounting,
    info: dict[str, np.ndarray],
    state: SimulationState,
    done: int,
) -> list[dict[str, Any]]:
    """Charges each round to the ledgers and turns its info into a row of metrics."""
    rows, accountant = [], experiment.config.privacy.accountant
    num_rounds = len(info["participants"])
    for i in range(num_rounds):
        accounting.charge({name: value[i : i + 1] for name, value in info.items()}, state)
        # PLD takes seconds for each distinct history: it is asked once a checkpoint.
        is_asked = accountant != "pld" or (
            (done + i + 1) % experiment.config.run.checkpoint_every == 0
        )
        spent = accounting.epsilon(experiment.dp_delta, accountant) if is_asked else {}
        row = {name: value[i] for name, value in info.items() if name != "participants"}
        if "num_clipped" in row:
            joined = max(int(row["num_participants"]), 1)
            row["clipped_client_share"] = float(row["num_clipped"]) / joined
        row |= {f"epsilon_{unit}": float(np.max(each)) for unit, each in spent.items()}
        rows.append({"round": done + i + 1} | row)
    return rows


def _evaluate(experiment: Experiment, state: SimulationState) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if experiment.evaluator.clients is not None:
        by_client = experiment.evaluator.clients(state)
        row |= {"client_test_loss": by_client.loss, "client_test_accuracy": by_client.accuracy}
        row |= summarize(by_client)
        row["test_accuracy"] = by_client.accuracy
        row["test_loss"] = by_client.loss
    if experiment.evaluator.whole is not None:
        whole = experiment.evaluator.whole(state)
        row |= {"test_loss": whole.loss, "test_accuracy": whole.accuracy}
    return row


def _finish(
    experiment: Experiment,
    state: SimulationState,
    accounting: PrivacyAccounting,
    folder: pathlib.Path,
    timing: dict[str, float],
) -> dict[str, Any]:
    config, rows = experiment.config, read_metrics(folder)
    accountant = config.privacy.accountant
    spent = accounting.epsilon(experiment.dp_delta, accountant)
    deltas = [float(delta) for unit in spent for delta in np.ravel(experiment.dp_delta[unit])]
    evaluated = _evaluate(experiment, state)
    summary = {
        "name": config.run.name,
        "algorithm": experiment.simulation.algorithm.name,
        **evaluated,
        "epsilon": max((float(np.max(each)) for each in spent.values()), default=None),
        "dp_delta": max(deltas, default=None),
        "dp_delta_smallest": min(deltas, default=None),
        **{f"epsilon_{unit}": float(np.max(each)) for unit, each in spent.items()},
        "rounds": int(state.round),
        "num_clients": experiment.population.train.num_clients,
        "num_parameters": experiment.num_parameters,
        "padding_share": float(np.mean([row["padding_share"] for row in rows])) if rows else None,
        "clients_per_chunk": experiment.simulation.shape.chunk,
        **_of_updates(rows),
        **timing,
    }
    # Computed exactly on held-out data, for the experimenter: no ε covers them.
    summary["not_private"] = sorted(evaluated)
    if experiment.simulation.algorithm.not_covered is not None:
        summary["not_covered"] = experiment.simulation.algorithm.not_covered
    # JSON has no infinity, and null would read as if nothing were claimed.
    infinite = {k: "inf" for k, v in summary.items() if k.startswith("epsilon") and v == np.inf}
    write_json(folder / "summary.json", summary | infinite)
    facts = _facts(experiment, state)
    write_statement(folder, accounting.ledgers, experiment.dp_delta, accountant, facts)
    title = f"{config.run.name}: {experiment.simulation.algorithm.name}"
    plots.save(plots.accuracy_and_epsilon(rows, title), folder / "plots" / "accuracy_epsilon.png")
    if any("update_norm_quantiles" in row for row in rows):
        clip_norm = experiment.client_clip_norm
        figure = plots.update_norms(rows, None if clip_norm is None else float(clip_norm), title)
        plots.save(figure, folder / "plots" / "update_norms.png")
    if experiment.evaluator.clients is not None:
        accuracies = experiment.evaluator.clients(state).client_accuracy
        if np.isfinite(accuracies).any():
            sizes = experiment.population.train.sizes
            figure = plots.client_accuracies(accuracies, sizes, title)
            plots.save(figure, folder / "plots" / "client_accuracy.png")
    partition = experiment.population.statistics()
    plots.save(draw_partition(partition), folder / "plots" / "partition.png")
    write_text(folder / "partition.txt", f"{partition}\n")
    return summary


def _of_updates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Averages over rounds what was measured of the updates and of the noise on their mean."""
    found = {
        "update_norm_median": [
            r["update_norm_quantiles"][2] for r in rows if "update_norm_quantiles" in r
        ],
    }
    for name in ("clipped_client_share", "noise_stddev", "bits_per_parameter"):
        found[name] = [row[name] for row in rows if row.get(name) is not None]
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _facts(experiment: Experiment, state: SimulationState) -> dict[str, dict[str, Any]]:
    """Reads off the state what ran, whatever calibration would give today."""
    num_clients = experiment.population.train.num_clients

    def by_client(value: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), num_clients)

    level = experiment.config.privacy.client
    name = "initial_clip_norm" if level.adaptive_clipping else "clip_norm"
    root: dict[str, Any] = {"noise_root": "seed"}
    if experiment.config.run.secret:
        root = {"noise_root": "secret", "noise_root_file": f"{CHECKPOINT_FOLDER}/{ROOT_FILE}"}
    facts = {"client": {name: experiment.client_clip_norm} | root, "record": root}
    if level.mechanism == "discrete_gaussian":
        # Every client adds its share of the noise; no server sees a single contribution.
        facts["client"]["trust"] = "secure_aggregation"
    if state.config.clip_norm is not None:
        facts["record"] = root | {
            "not_covered": experiment.simulation.algorithm.not_covered,
            "clip_norm_per_unit": by_client(state.config.clip_norm),
            "noise_multiplier_per_unit": by_client(state.config.noise_multiplier),
        }
    return facts


def _report(
    console: Console,
    summary: dict[str, Any],
    folder: pathlib.Path,
    interrupted: bool,
    is_over_budget: bool,
) -> None:
    if interrupted:
        console.print(
            f"interrupted after round {summary['rounds']}; nothing is lost: "
            f"fedjax-dp run --resume {folder}"
        )
    if is_over_budget:
        console.print(f"stopped after round {summary['rounds']}: one more would exceed the budget")
    parts = [f"{summary['rounds']} rounds in {summary['seconds']:.1f} s"]
    if np.isfinite(summary.get("test_accuracy", np.nan)):
        parts.append(f"test accuracy {summary['test_accuracy']:.4f}")
    if summary.get("worst_client_accuracy") is not None:
        parts.append(f"worst client {summary['worst_client_accuracy']:.4f}")
    if summary["epsilon"] is not None:
        low, high = summary["dp_delta_smallest"], summary["dp_delta"]
        delta = f"{high:g}" if low == high else f"{low:g} to {high:g}"
        parts.append(f"ε = {summary['epsilon']:.3f} at δ = {delta}")
        if "not_covered" in summary:
            parts.append(f"NOT covered: {summary['not_covered']}")
    else:
        parts.append("no privacy is claimed")
    console.print(", ".join(parts))
    console.print(f"run folder: {folder}", soft_wrap=True)


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a wish to stop after the rounds under way."""
    seen = 0

    def note(signum: int, frame: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # Not the main thread: nobody presses Ctrl-C here.
        yield lambda: False
        return
    try:
        yield lambda: seen > 0
    finally:
        signal.signal(signal.SIGINT, before)
