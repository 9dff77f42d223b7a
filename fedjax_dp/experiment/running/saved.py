"""Reads the newest intact checkpoint of a run, for all that resume or use it."""

import pathlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.algorithms.values import Hyper
from fedjax_dp.core import checks
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.config_diff import differences
from fedjax_dp.experiment.running.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE, DATA_FILE
from fedjax_dp.experiment.running.same_data import require_same_data
from fedjax_dp.experiment.schema.config import (
    BoundedLaplaceLevel,
    Config,
    CorrelatedGaussianLevel,
)
from fedjax_dp.io.checkpoint import Checkpoints
from fedjax_dp.io.digests import damage_of, sealed_names
from fedjax_dp.models import kinds


def config_of(
    folder: pathlib.Path, warn: Callable[[str], None], words: Sequence[str] = ()
) -> Config:
    """Reads the configuration of a run folder; warns if it is not as the run wrote it."""
    if wrong := damage_of(folder, CONFIG_FILE):
        warn(f"{folder / CONFIG_FILE} {wrong}")
    return config_files.load_config(folder / CONFIG_FILE, words)


class Saved(NamedTuple):
    """A checkpoint of a run: its state, its hyperparameters, and what was saved with them."""

    state: SimulationState
    hyper: Hyper
    extra: dict[str, Any]


def read_newest(
    experiment: Experiment,
    folder: pathlib.Path,
    checkpoints: Checkpoints,
    like: SimulationState,
    warn: Callable[[str], None],
) -> tuple[Saved | None, dict[int, str]]:
    """Reads the newest intact checkpoint of the same run, or None, and names damaged newer ones."""
    step, damaged = checkpoints.newest_intact(like)
    for rounds, wrong in damaged.items():
        warn(f"the checkpoint of round {rounds} is damaged ({wrong}) and is skipped")
    if not damaged:
        for name in sealed_names(folder):
            if name.startswith(f"{CHECKPOINT_FOLDER}/") and (lost := damage_of(folder, name)):
                warn(f"{folder / name} {lost}: the newest checkpoint was lost")
    saved = None
    if step is not None:
        # Before arrays, which another configuration cannot read.
        extra = checkpoints.extra(step)
        require_same_config(experiment.written, extra["config"])
        _require_same_base(experiment, extra)
        saved = Saved(*checkpoints.restore(like, experiment.simulation.hyper, step))
        place = checkpoints.directory / str(step)
        fits = int(saved.state.round) == step
        checks.require(fits, str(place), f"be of round {step}", "another round")
    file = folder / DATA_FILE
    if not file.is_file() and damage_of(folder, DATA_FILE):
        warn(f"{file} is missing: whether the data are those of the run is unknown")
    require_same_data(experiment.population, file)
    return saved, damaged


def require_same_config(config: Config, saved: str) -> None:
    """Requires the configuration of the run, except for how it executes and is published."""
    # Keys that the saved file lacks have their defaults.
    started = config_files.from_toml(saved, CONFIG_FILE)
    now, then = (tomllib.loads(config_files.to_toml(each)) for each in (config, started))
    before, after = (tables["execution"].get("placement") for tables in (then, now))
    same = (before == "disk") == (after == "disk")
    rule = f"not change between memory and disk when a run resumes; it was {before!r}"
    checks.require(same, "execution.placement", rule, after)
    besides = ["execution", "run.release", "run.plots"]
    if config.run.rounds > started.run.rounds:
        _require_extensible(config, started.run.rounds)
        besides.append("run.rounds")
    lines = differences(then, now, besides)
    if lines:
        raise ValueError(
            f"{CONFIG_FILE} must be as it was when the run started; only [execution], run.release "
            "and run.plots may change, and run.rounds may grow. Then and now:\n" + "\n".join(lines)
        )


def _require_same_base(experiment: Experiment, extra: Mapping[str, Any]) -> None:
    """Requires the frozen parameters of a checkpoint; older checkpoints do not name them."""
    now = kinds.digest(experiment.model.frozen)
    then, source = extra.get("frozen", now), experiment.config.model.pretrained
    rule = f"be those of the checkpoint, of SHA-256 {then[:12] or 'none'}; use the same base file"
    checks.require(now == then, f"frozen parameters of {source or 'the model'}", rule, now[:12])


def _require_extensible(config: Config, planned: int) -> None:
    """Requires that neither noise nor algorithm depends on the number of rounds."""
    privacy, name = config.privacy, config.algorithm.name
    for unit in privacy.units:
        level = getattr(privacy, unit)
        is_free = level.noise_multiplier is not None
        # The former ties rounds together; the latter spends δ of all rounds on its range.
        is_free &= not isinstance(level, CorrelatedGaussianLevel | BoundedLaplaceLevel)
        rule = f"be {planned}: the noise was calibrated for that many rounds"
        checks.require(is_free, "run.rounds", rule, config.run.rounds)
    rule = f"be {planned}, the number of rounds that {name} was built for"
    is_planned = "num_rounds" in ALGORITHMS[name].given
    checks.require(not is_planned, "run.rounds", rule, config.run.rounds)
