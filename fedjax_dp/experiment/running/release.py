"""What of a run may be published: a mark for each file and key, and a folder of the rest."""

import pathlib
import shutil
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import tomli_w

from fedjax_dp.core import checks
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.callbacks import Callback
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RELEASE_FOLDER,
)
from fedjax_dp.io.logbook import write_json, write_text
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
# Files that repeat the seed of a run.
_WITH_SEED = (CONFIG_FILE, "privacy.json", "privacy.md")
# What a run folder holds of the partition, and a release does not.
PARTITION_COUNTS = (
    "the counts of examples and labels by client in `partition.txt` and `plots/partition.png`"
)
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
      is_secret: whether the root of the noise is kept in the checkpoint alone; else the seed is
        that root, which configuration and statement repeat.

    Returns:
      A mark for each file, and for each folder with all that is in it: "public", "covered" by the
      stated ε, "exact", or "secret", what would take noise away. Files of unknown names are exact.
    """
    known: dict[str, Mark] = dict(_MARKS)
    if not is_secret:
        known |= dict.fromkeys(_WITH_SEED, "secret")
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
    exact = read_exactly(experiment)
    rule = f"be left out: no ε covers {'; '.join(exact)}"
    checks.require(not exact, name, rule, section.release)
    population = experiment.population
    num_shared, holders = population.sharing
    # As `privacy.statement`: copies within one account are no copies that compose.
    is_stated = "record" not in claims.units or population.train.num_clients >= holders
    rule = (
        f"be left out: no ε can be stated for {num_shared} records that lie with several clients, "
        "whose copies were put together in one account"
    )
    checks.require(num_shared == 0 or is_stated, name, rule, section.release)


def read_exactly(experiment: Experiment) -> list[str]:
    """Names what was read exactly off the data, beside what every run reads.

    Args:
      experiment: the experiment.

    Returns:
      What entered the training without noise, in words.
    """
    found = list(experiment.population.exact_statistics)
    count = experiment.config.data.public_examples
    if count:
        found.append(f"{count} examples of the training part, which were taken for public inputs")
    return found


def without_model(experiment: Experiment) -> str:
    """Warns of a release that will hold no model.

    Args:
      experiment: what is to run.

    Returns:
      A warning, or nothing.
    """
    simulation = experiment.simulation
    if experiment.config.run.release is None or simulation.federation.shared is not None:
        return ""
    return (
        f"run.release: {simulation.algorithm.name} has no shared model, so that the folder "
        f"{RELEASE_FOLDER} holds none"
    )


def withdraw_release(folder: pathlib.Path) -> None:
    """Removes the folder for publication of a run that is resumed, which is of earlier rounds.

    Args:
      folder: the run folder.
    """
    if (folder / RELEASE_FOLDER).exists():
        shutil.rmtree(folder / RELEASE_FOLDER)


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
    no metrics, plots or counts of the partition, no bytes or seconds, which reveal how many took
    part, and no checkpoint, which holds the root of the noise and client state. Clients are
    numbered and not named, and of files only their own names are left.

    Args:
      experiment: what ran.
      state: the last state.
      accounting: the ledgers.
      folder: the run folder.
      summary: its summary.
      facts: by unit, what the statement says.
    """
    withdraw_release(folder)
    into = folder / RELEASE_FOLDER
    into.mkdir()
    write_text(into / CONFIG_FILE, public_config(experiment))
    shutil.copyfile(folder / ENVIRONMENT_FILE, into / ENVIRONMENT_FILE)
    write_json(into / "summary.json", public_summary(summary))
    shared = experiment.simulation.federation.shared
    marks: dict[str, Mark] = {CONFIG_FILE: "public", ENVIRONMENT_FILE: "public"}
    marks |= dict.fromkeys(_STATED, "covered")
    if shared is not None:
        params = experiment.model.full_params(shared(state))
        write_params(into / MODEL_FILE, params)
        marks[MODEL_FILE] = "covered"
    own, accountant = public_facts(facts), experiment.config.privacy.accountant
    write_statement(into, accounting.ledgers, experiment.dp_delta, accountant, own, marks)


def public_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the part of a summary that may be published.

    Args:
      summary: what `summary.json` of the run folder holds.

    Returns:
      Its open entries by name; `epsilon` and `dp_delta` are those of a record as a whole where
      several clients have copies of it, if these are larger.
    """
    exact = exact_keys(summary)
    public = {key: summary[key] for key in sorted(summary) if key not in exact}
    for name in ("epsilon", "dp_delta"):
        own, whole = public.get(name), public.get(f"{name}_of_shared_record")
        if own is not None and whole is not None:
            public[name] = max(own, whole, key=float)
    return public | {"not_private": []}


def public_config(experiment: Experiment) -> str:
    """Writes the configuration of a run without names of clients and places of files.

    Args:
      experiment: what ran.

    Returns:
      TOML text: numbers by client are lists, `data.data_dir` is left out, and of every text that
      has the form of a path the last part is left.
    """
    # Not `written`, which puts numbers by client under their names.
    tables = tomllib.loads(config_files.to_toml(experiment.config))
    tables["data"].pop("data_dir", None)
    # Paths of parameters are no places of files.
    frozen = tables["model"].get("frozen")
    tables = _without_places(tables)
    if frozen is not None:
        tables["model"]["frozen"] = frozen
    return tomli_w.dumps(tables)


def _without_places(value: Any) -> Any:
    """Cuts every text within a value down to the last part of the path that it may be."""
    if isinstance(value, Mapping):
        return {_without_places(key): _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if isinstance(value, str):
        parts = [part for part in value.replace("\\", "/").split("/") if part]
        return parts[-1] if parts and parts[-1] != value else value
    return value


def public_facts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gives the part of a statement's facts that may be published.

    Args:
      facts: by unit, what the statement of the run folder says.

    Returns:
      The same without names of clients, and without what lies in the run folder alone.
    """
    hidden = ("noise_root_file", "client_names")
    found = {
        unit: {name: value for name, value in each.items() if name not in hidden}
        for unit, each in facts.items()
    }
    for each in found.values():
        said = each["also_not_private"]
        each["also_not_private"] = [text for text in said if text != PARTITION_COUNTS]
    return found
