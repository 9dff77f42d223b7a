"""What of a run may be published: a mark for each file and key, and a folder of the rest."""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Literal

from fedjax_dp.core import checks
from fedjax_dp.engine.accounting import PrivacyAccounting
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.assemble import Experiment
from fedjax_dp.experiment.callbacks import Callback
from fedjax_dp.experiment.folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RELEASE_FOLDER,
)
from fedjax_dp.io.logbook import write_json
from fedjax_dp.io.params import write_params
from fedjax_dp.io.statement import write_statement

Mark = Literal["public", "covered", "exact", "secret"]
MODEL_FILE = "model.safetensors"
# What a file of a run folder holds; a folder stands for all that lies in it.
_MARKS: Mapping[str, Mark] = {
    CONFIG_FILE: "public",
    ENVIRONMENT_FILE: "public",
    "privacy.json": "covered",
    "privacy.md": "covered",
    "summary.json": "exact",
    "metrics.jsonl": "exact",
    "partition.txt": "exact",
    "plots": "exact",
    "tensorboard": "exact",
    CHECKPOINT_FOLDER: "secret",
    CLIENTS_FOLDER: "exact",
    RELEASE_FOLDER: "covered",
    ".lock": "public",
}
_STATED = ("privacy.json", "privacy.md", "summary.json")
# Entries of a summary that follow from the configuration, from public sizes and from what is
# released under ε. Whatever else it holds is exact.
_OPEN = {
    "name",
    "algorithm",
    "dp_delta",
    "dp_delta_smallest",
    "rounds",
    "num_clients",
    "num_parameters",
    "dp_delta_of_shared_record",
    "clients_per_chunk",
    "test_accuracy_of",
    "covered_models",
    "not_covered",
    "not_private",
}


def exact_keys(summary: Mapping[str, Any], *, is_length_public: bool = True) -> list[str]:
    """Lists the entries of a summary that no ε covers.

    Args:
      summary: what `summary.json` holds.
      is_length_public: whether the number of rounds follows from configuration and budget alone.

    Returns:
      All names but those that are known to follow from public facts and counted releases.
    """
    known = _OPEN if is_length_public else _OPEN - {"rounds"}
    return sorted(key for key in summary if key not in known and not key.startswith("epsilon"))


def marks_of(folder: pathlib.Path, *, is_secret: bool) -> dict[str, Mark]:
    """Marks what lies in a run folder.

    Args:
      folder: the run folder.
      is_secret: whether the root of the noise is kept in the checkpoint alone; else the seed in the
        configuration is that root.

    Returns:
      A mark for each file, and for each folder with all that is in it: "public", "covered" by the
      stated ε, "exact", or "secret", what would take noise away. Files of unknown names are exact.
    """
    known: dict[str, Mark] = {**_MARKS, CONFIG_FILE: "public" if is_secret else "secret"}
    # These are about to be written beside what is there.
    names = {path.name for path in folder.iterdir()} | {*_STATED}
    return {name: known.get(name, "exact") for name in sorted(names)}


def require_publishable(experiment: Experiment, callbacks: Mapping[str, Callback]) -> None:
    """Refuses to promise a folder for publication of a run that no ε would cover.

    Args:
      experiment: what is to run.
      callbacks: what is called at its evaluations.

    Raises:
      ValueError: naming the key, the rule and the value.
    """
    section, name = experiment.config.run, "run.release"
    if section.release is None:
        return
    deciding = [name for name, callback in callbacks.items() if not callback.is_private]
    rule = "decide by released models and public facts alone where run.release is 'private'"
    checks.require(not deciding, "run.callbacks", rule, deciding)
    claims = experiment.simulation.federation.claims
    for unit in experiment.config.privacy.units:
        rule = f"be left out: the {unit} level of this run claims no privacy"
        checks.require(unit in claims.units, name, rule, section.release)
    not_covered = claims.not_covered
    rule = f"be left out: no noise protects {not_covered}"
    checks.require(not_covered is None, name, rule, section.release)
    exact = experiment.population.exact_statistics
    rule = f"be left out: no ε covers {'; '.join(exact)}"
    checks.require(not exact, name, rule, section.release)


def write_release(
    experiment: Experiment,
    state: SimulationState,
    accounting: PrivacyAccounting,
    folder: pathlib.Path,
    summary: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes the part of a run that may be published into a folder of its own.

    It holds the configuration, libraries and machine, the statement, the public part of the summary
    and, where there is one, the shared model. No exact figure is in it, nor what it was drawn from:
    no metrics, plots or counts of the partition, no bytes or seconds, which tell how many took
    part, and no checkpoint, which holds the root of the noise and what clients keep.

    Args:
      experiment: what ran.
      state: the last state.
      accounting: the ledgers.
      folder: the run folder.
      summary: its summary.
      facts: by unit, what the statement says.
    """
    into = folder / RELEASE_FOLDER
    if into.exists():
        shutil.rmtree(into)
    into.mkdir()
    for name in (CONFIG_FILE, ENVIRONMENT_FILE):
        shutil.copyfile(folder / name, into / name)
    public = {key: summary[key] for key in summary.keys() - {*exact_keys(summary)}}
    write_json(into / "summary.json", dict(sorted(public.items())) | {"not_private": []})
    shared = experiment.simulation.federation.shared
    marks: dict[str, Mark] = {CONFIG_FILE: "public", ENVIRONMENT_FILE: "public"}
    marks |= dict.fromkeys(_STATED, "covered")
    if shared is not None:
        params = experiment.model.full_params(shared(state))
        write_params(into / MODEL_FILE, params)
        marks[MODEL_FILE] = "covered"
    own = {unit: _without_place(each) for unit, each in facts.items()}
    accountant = experiment.config.privacy.accountant
    write_statement(into, accounting.ledgers, experiment.dp_delta, accountant, own, marks)


def _without_place(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The root of the noise lies in no file of a release."""
    return {name: value for name, value in facts.items() if name != "noise_root_file"}
