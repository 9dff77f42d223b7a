"""Which files and figures of a run may be published, and the release folder with them."""

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedjax_dp.core import checks
from fedjax_dp.core.files import entry_of, write_text
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.noised import METRIC
from fedjax_dp.experiment.components.experiment import Callback, Experiment
from fedjax_dp.experiment.components.keeping import kept_metric
from fedjax_dp.experiment.components.measured import RELEASED as NOISED_METRICS
from fedjax_dp.experiment.components.numbers_by_client import KEYS as CLIENT_KEYS
from fedjax_dp.experiment.components.trackers import TRACKERS_FILE
from fedjax_dp.experiment.running.described import about_model, public_config, public_tables
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    NODES_FILE,
    RELEASE_FOLDER,
    REPORT_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    SWEEP_FILE,
)
from fedjax_dp.io.digests import DIGESTS_FILE, read_sealed_object, seal
from fedjax_dp.io.logbook import METRICS_FILE, write_json
from fedjax_dp.io.params import write_params
from fedjax_dp.io.statement import write_statement

Mark = Literal["public", "covered", "named", "exact", "secret"]
MODEL_FILE, PARTITION_FILE = "model.safetensors", "partition.txt"
# Results of each client, and its tables.
BY_CLIENT_FILE = "by_client.jsonl"
# By file of a run folder; a folder covers all files in it.
_MARKS: Mapping[str, Mark] = {
    CONFIG_FILE: "public",
    ENVIRONMENT_FILE: "public",
    SWEEP_FILE: "public",
    "privacy.json": "covered",
    "privacy.md": "covered",
    # They show no seed.
    "privacy.tex": "covered",
    "privacy.bib": "covered",
    "summary.json": "exact",
    PARTITION_FILE: "exact",
    BY_CLIENT_FILE: "exact",
    # A digest confirms a guess of the records.
    DATA_FILE: "exact",
    TRACKERS_FILE: "exact",
    "plots": "exact",
    "tensorboard": "exact",
    CHECKPOINT_FOLDER: "secret",
    CLIENTS_FOLDER: "exact",
    # Of a deployment: they show who was drawn.
    NODES_FILE: "secret",
    SCORES_FILE: "secret",
    RELEASE_FOLDER: "covered",
    REPORT_FILE: "exact",
    ".lock": "public",
    # As of data.
    DIGESTS_FILE: "exact",
    METRICS_FILE: "exact",
}
CLAIMS_FILE = "privacy.json"
MAY_BE_PUBLISHED = ("public", "covered")
STATEMENT_FILES = ("privacy.json", "privacy.md", "privacy.tex", "privacy.bib")
STATED = (*STATEMENT_FILES, "summary.json")
# Of a release, besides statement and summary.
RELEASED: Mapping[str, Mark] = {
    MODEL_FILE: "covered",
    CONFIG_FILE: "public",
    ENVIRONMENT_FILE: "public",
}
# Files that show the seed of a run, or confirm a guess of it.
_WITH_SEED = (CONFIG_FILE, REPORT_FILE, "privacy.json", "privacy.md", DIGESTS_FILE)
# Of files in a run folder, which are not in a release.
_COUNTS = "the counts of examples and labels by client in "
# Summary entries that depend only on the configuration, public sizes and what ε covers. All others
# are exact.
_OPEN = {
    "name",
    "algorithm",
    "dp_delta",
    "dp_delta_smallest",
    "dp_delta_record",
    "dp_delta_client",
    "rounds",
    METRIC,
    "num_clients",
    "num_unseen_clients",
    "num_parameters",
    "parameters",
    "dp_delta_of_shared_record",
    "clients_per_chunk",
    "products",
    "test_accuracy_of",
    "covered_models",
    "not_covered",
    "deployment",
    "secure_aggregation",
    "not_private",
}


def exact_keys(summary: Mapping[str, Any], *, is_length_public: bool = True) -> list[str]:
    """Lists the summary entries that ε does not cover: all not known to be public."""
    known = _OPEN if is_length_public else _OPEN - {"rounds"}
    return sorted(key for key in summary if key not in known and not key.startswith("epsilon"))


def partition_counts(folder: pathlib.Path) -> str:
    """Names the files of a run folder with counts of the partition."""
    plots = [f"plots/partition.{kind}" for kind in ("png", "pdf")]
    *names, last = [f"`{n}`" for n in ("partition.txt", *plots) if (folder / n).is_file()]
    return _COUNTS + " and ".join([*([", ".join(names)] if names else []), last])


def naming_files(tables: Mapping[str, Any], client_names: Sequence[str]) -> list[str]:
    """Lists the files of a run folder that name clients, or files and folders of this machine."""
    by_client = (entry_of(tables, *key.split(".")) for key in CLIENT_KEYS)
    is_plain = public_tables(tables) == tables and not any(
        isinstance(x, Mapping) for x in by_client
    )
    return [CONFIG_FILE] * (not is_plain) + ["privacy.json", "privacy.md"] * bool(client_names)


def marks_of(
    folder: pathlib.Path, *, is_secret: bool, naming: Sequence[str] = ()
) -> dict[str, Mark]:
    """Marks the files and folders of a run folder; unknown ones count as exact."""
    known: dict[str, Mark] = {**_MARKS, **dict.fromkeys(naming, "named")}
    # Without a secret root the seed is the root of the noise, and files that show it are secret.
    if not is_secret:
        known |= dict.fromkeys(_WITH_SEED, "secret")
    # These are written later.
    names = {path.name for path in folder.iterdir()} | {*STATED, DIGESTS_FILE}
    return {name: known.get(name, "exact") for name in sorted(names)}


def marks_now(folder: pathlib.Path, tables: Mapping[str, Any]) -> dict[str, Mark]:
    """Marks what a run folder holds now, by the configuration and the statement of its run."""
    claims = read_sealed_object(folder, CLAIMS_FILE).get("claims", [])
    names = [name for claim in claims for name in claim.get("client_names", ())]
    is_secret = entry_of(tables, "run", "secret") is True
    return marks_of(folder, is_secret=is_secret, naming=naming_files(tables, names))


def publishable_files(folder: pathlib.Path) -> dict[str, str]:
    """Returns the marks of a release that may be published; none for any other folder."""
    marks = read_sealed_object(folder, CLAIMS_FILE).get("files", {})
    if not isinstance(marks, dict):
        return {}
    public = {name: mark for name, mark in marks.items() if mark in MAY_BE_PUBLISHED}
    # The summary of a whole run is exact.
    return public if {CONFIG_FILE, SUMMARY_FILE} <= public.keys() else {}


def require_publishable(experiment: Experiment, callbacks: Mapping[str, Callback]) -> None:
    """Refuses `run.release` for a run that no ε would cover."""
    section, name = experiment.config.run, "run.release"
    if section.release is None:
        return
    deciding = [name for name, callback in callbacks.items() if not callback.is_private]
    rule = "depend on released models and public facts only if run.release is 'private'"
    checks.require(not deciding, "run.callbacks", rule, deciding)
    rule = f"be 'last' if run.release is 'private', or best:{METRIC}: other metrics are exact"
    fits = section.keep == "last" or kept_metric(section) in NOISED_METRICS
    checks.require(fits, "run.keep", rule, section.keep)
    rule = "be left out: the results of other runs could end this one early"
    checks.require("pruner" not in experiment.stated, name, rule, section.release)
    claims = experiment.simulation.federation.claims
    for unit in experiment.config.privacy.units:
        rule = f"be left out: this run claims no {unit}-level privacy"
        checks.require(unit in claims.units, name, rule, section.release)
    not_covered = claims.not_covered
    rule = f"be left out: no noise protects {not_covered}"
    checks.require(not_covered is None, name, rule, section.release)
    exact = read_exactly(experiment)
    rule = f"be left out: no ε covers {'; '.join(exact)}"
    checks.require(not exact, name, rule, section.release)
    population = experiment.population
    num_shared, holders = population.sharing
    # As in `privacy.reports.statement`, which cannot compose copies within one account.
    is_stated = "record" not in claims.units or population.train.num_clients >= holders
    rule = (
        f"be left out: no ε can be stated for {num_shared} records that several clients hold, as "
        "their copies share one account"
    )
    checks.require(num_shared == 0 or is_stated, name, rule, section.release)


def read_exactly(experiment: Experiment) -> list[str]:
    """Lists what training reads exactly of the data in addition to every run."""
    found = list(experiment.population.exact_statistics)
    count = experiment.config.data.public_examples
    if count:
        found.append(f"{count} examples of the training part, which became public inputs")
    return found


def without_model(experiment: Experiment) -> str:
    """Returns a warning if a release will contain no model, else ""."""
    simulation = experiment.simulation
    if experiment.config.run.release is None or simulation.federation.shared is not None:
        return ""
    return (
        f"run.release: {simulation.algorithm.name} has no shared model, so the folder "
        f"{RELEASE_FOLDER} will have none"
    )


def withdraw_release(folder: pathlib.Path) -> None:
    """Removes the release folder of a resumed run, which holds earlier rounds."""
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
    """Writes the publishable part of a run into its release folder."""
    # No metrics, plots or counts of the partition, and no bytes or seconds, which reveal how many
    # took part; no checkpoint, which holds noise root and client state; no client or folder names.
    withdraw_release(folder)
    into = folder / RELEASE_FOLDER
    into.mkdir()
    write_text(into / CONFIG_FILE, public_config(experiment))
    shutil.copyfile(folder / ENVIRONMENT_FILE, into / ENVIRONMENT_FILE)
    write_json(into / "summary.json", public_summary(summary))
    shared = experiment.simulation.federation.shared
    if shared is not None:
        params = experiment.model.full_params(shared(state))
        write_params(into / MODEL_FILE, params, about=about_model(experiment))
    marks = {name: mark for name, mark in RELEASED.items() if (into / name).is_file()}
    marks |= dict.fromkeys((*STATED, DIGESTS_FILE), "covered")
    own, accountant = public_facts(facts), experiment.config.privacy.accountant
    write_statement(into, accounting.ledgers, experiment.dp_delta, accountant, own, marks)
    seal(into, [name for name in marks if name != DIGESTS_FILE])


def public_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the publishable part of a summary; ε of a shared record counts if it is larger."""
    exact = exact_keys(summary)
    public = {key: summary[key] for key in sorted(summary) if key not in exact}
    for name in ("epsilon", "dp_delta"):
        own, whole = public.get(name), public.get(f"{name}_of_shared_record")
        if own is not None and whole is not None:
            public[name] = max(own, whole, key=float)
    return public | {"not_private": []}


def public_facts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the facts of a statement without client names or files of the run folder."""
    hidden = ("noise_root_file", "client_names")
    found = {
        unit: {name: value for name, value in each.items() if name not in hidden}
        for unit, each in facts.items()
    }
    for each in found.values():
        said = each["also_not_private"]
        each["also_not_private"] = [text for text in said if not text.startswith(_COUNTS)]
    return found
