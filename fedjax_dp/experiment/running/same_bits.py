"""Whether a resumed run draws the numbers that it drew before, and rounds them as it did."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_dp.core import checks
from fedjax_dp.core.keys import require_settings
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.environment import RANDOM, environment
from fedjax_dp.experiment.running.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, is_deployed
from fedjax_dp.io.digests import read_sealed_object
from fedjax_dp.io.logbook import read_metrics

# What decides how a program rounds, beside `[execution]`.
_ROUNDING = ("libraries", "processor", "backend", "device kinds", "compiler")
# Keys of `[execution]` that change no bit.
_WITHOUT_BITS = (
    *("placement", "compilation_cache", "measured"),
    *("coordinator", "num_processes", "process_id"),
)


def require_same_numbers(folder: pathlib.Path) -> None:
    """Refuses settings of JAX that would change cohorts, batches and noise."""
    require_settings(read_sealed_object(folder, ENVIRONMENT_FILE).get(RANDOM, {}))


def require_same_rounding(
    experiment: Experiment, folder: pathlib.Path, num_rounds: int, warn: Callable[[str], None]
) -> None:
    """Refuses to repeat the noise of a secret run with other rounding; else warns of it.

    Rounds that were logged after the newest checkpoint, of `num_rounds`, run again: with the same
    noise and other rounding, the difference of two releases has no noise.
    """
    then, now = read_sealed_object(folder, ENVIRONMENT_FILE), environment()
    known = [name for name in _ROUNDING if name in then]
    rounded = _differences({k: then[k] for k in known}, {k: now[k] for k in known})
    rounded += _differences(*map(_execution, _configs(experiment, folder)))
    last = max((int(row["round"]) for row in read_metrics(folder)), default=0)
    if last and not then:
        rounded.append(f"{ENVIRONMENT_FILE} is missing")
    if not rounded:
        return
    repeats = last > num_rounds and experiment.config.run.secret and not is_deployed(folder)
    is_private = bool(experiment.simulation.federation.claims.units)
    rule = (
        f"be as they were: rounds {num_rounds + 1} to {last}, which run again from the newest "
        "checkpoint, would have the same noise and other rounding, so that the difference of two "
        "releases has no noise; nearest valid choice: a new run"
    )
    found = "; ".join(rounded)
    checks.require(not (repeats and is_private), "versions, devices and [execution]", rule, found)
    warn(
        "this run is not bit for bit the one that was never interrupted, since rounding differs: "
        f"{found}"
    )


def _configs(experiment: Experiment, folder: pathlib.Path) -> tuple[Any, Any]:
    """Returns the configurations of the run: that of its last start, and that of now."""
    saved = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    return config_files.from_toml(saved, CONFIG_FILE), experiment.written


def _execution(config: Any) -> dict[str, Any]:
    """Returns the keys of `[execution]` that decide bits."""
    section = config.execution.model_dump()
    return {f"execution.{k}": v for k, v in section.items() if k not in _WITHOUT_BITS}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names the facts that differ, with both values; those of tables one by one."""
    found = []
    for name in dict.fromkeys((*then, *now)):
        before, after = then.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after)
        elif before != after:
            found.append(f"{name} was {before} and is {after}")
    return found
