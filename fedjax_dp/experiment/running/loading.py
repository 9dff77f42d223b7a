"""Loads a run from its folder: experiment, state, ledgers, metrics, model."""

import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks, files, masks
from fedjax_dp.core.files import entry_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.datasets.base import Encoding
from fedjax_dp.data.federated import FederatedData, flat, nested
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.client_store import stored_in
from fedjax_dp.engine.evaluation import Evaluator, evaluator, of_shared
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.sides import clients_at_server
from fedjax_dp.evaluation.metrics import metrics_of
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.assembly.own_data import (
    Registered,
    population_without_records,
    public_test,
)
from fedjax_dp.experiment.assembly.population import build_population, require_vocabulary
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.components.schedules import after_plateaus, plateaus_of
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.environment import use_compilation_cache
from fedjax_dp.experiment.running.results import by_client_text, evaluate
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CLIENTS_FOLDER,
    CONFIG_FILE,
    JOURNAL_FILE,
    REGISTERED_FILE,
    config_of,
    is_deployed,
    read_newest,
)
from fedjax_dp.experiment.running.starting import accounting_of, first_state, saved_root
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.checkpoint import Checkpoints
from fedjax_dp.io.journal import JournalFile
from fedjax_dp.io.logbook import read_metrics
from fedjax_dp.models.base import Model

_BLOCK = 512


class Run(NamedTuple):
    """A run as loaded from its folder.

    Attributes:
      folder: the run folder.
      experiment: its configuration, data, model and simulation.
      state: the state of the newest intact checkpoint, or of the best round up to it if that one
        is kept.
      hyper: the hyperparameters of its rounds.
      accounting: the ledgers of all rounds up to that state; of a deployed run, of all that it has
        sent; of one that ended by a rule on what it had released, of all planned rounds.
      metrics: one dict for each of the rounds up to that checkpoint.
    """

    folder: pathlib.Path
    experiment: Experiment
    state: SimulationState
    hyper: Hyper
    accounting: PrivacyAccounting
    metrics: list[dict[str, Any]]

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.experiment.config

    @property
    def model(self) -> Model:
        """The model, which holds frozen parameters itself."""
        return self.experiment.model

    @property
    def params(self) -> PyTree:
        """The trained parameters of the shared model; a ValueError if there is none."""
        shared = self.experiment.simulation.federation.shared
        name = self.config.algorithm.name
        checks.require(shared is not None, "algorithm.name", "have a shared model", name)
        assert shared is not None
        return shared(self.state)

    def params_of(self, client: int) -> PyTree:
        """Returns the parameters that one client uses.

        Args:
          client: the client's index.

        Returns:
          Its personal parameters, or the shared ones if clients have none.

        Raises:
          ValueError: if there is no such client, or its personal model is on a node.
        """
        train = self.experiment.population.train
        checks.whole("client", client, at_least=0)
        is_there = 0 <= client < train.num_clients
        checks.require(is_there, "client", f"be in [0, {train.num_clients})", client)
        personal = self.experiment.simulation.federation.personal
        if personal is None:
            return self.params
        rule = "be none for a run on nodes, which personal models do not leave"
        checks.require(not is_deployed(self.folder), "client", rule, client)
        return masks.parted(personal(self.state, examples_of(train).client(client)))[0]


def load_run(folder: str | pathlib.Path, warn: Callable[[str], None] = warnings.warn) -> Run:
    """Loads a run, finished or not, without changing its folder.

    Args:
      folder: the run folder.
      warn: receives what is damaged, such as a checkpoint in place of which an older one is read.

    Returns:
      The run.

    Raises:
      ValueError: if the folder holds no run, no checkpoint is intact, or configuration or data
        are not those of the run.
    """
    folder = files.expanded(folder)
    is_run = (folder / CONFIG_FILE).is_file()
    checks.require(is_run, "folder", f"be a run folder with a {CONFIG_FILE}", str(folder))
    kept = folder / CHECKPOINT_FOLDER
    rule = "hold a checkpoint; of a release, model.safetensors alone has the parameters"
    checks.require(kept.is_dir(), "folder", rule, str(folder))
    config, population = config_of(folder, warn), None
    registered = Registered.read(kept / REGISTERED_FILE)
    if registered is not None:
        test = public_test(config, registered.kind)
        population = population_without_records(registered, test)
    use_compilation_cache(config.execution.compilation_cache)
    experiment = assemble(config, population)
    checkpoints = Checkpoints(kept, is_read_only=True)
    if is_deployed(folder):
        # As the server of a federation makes it, whatever the placement of simulated clients.
        first = experiment.simulation.federation.init(jax.random.key(config.run.seed))
        clients = clients_at_server(experiment.simulation.algorithm, first.clients)
        like = jax.device_get(first._replace(clients=clients))
        experiment = experiment._replace(evaluator=of_shared(experiment.evaluator))
    else:
        first = stored_in(first_state(experiment), folder / CLIENTS_FOLDER)
        like = experiment.simulation.portable(first)
    saved, damaged = read_newest(experiment, folder, checkpoints, like, warn)
    checks.require(saved is not None, str(kept), "hold an intact checkpoint", damaged)
    assert saved is not None
    state, hyper, extra, best = saved
    checkpoints.close()
    if damaged:
        warn(f"{folder} is read as of round {int(state.round)}")
    if is_deployed(folder):
        accounting = accounting_of(experiment, hyper, JournalFile(kept / JOURNAL_FILE).records())
    else:
        accounting = accounting_of(experiment, hyper)
        accounting.restore(extra["ledgers"])
    left = extra.get("planned_rounds", 0) - int(state.round)
    if left > 0:
        key = saved_root(config.run, checkpoints)
        accounting.ledgers = accounting.planned(state, key, left)
    rows = [row for row in read_metrics(folder, warn) if row["round"] <= int(state.round)]
    plateaus = plateaus_of(experiment.config)
    hyper = after_plateaus(hyper, plateaus, rows, config.run.evaluate_every)
    state = state if best is None else best.state
    return Run(folder, experiment, state, hyper, accounting, rows)


def other_data(
    run: Run, words: Sequence[str], *, needs_test_labels: bool = True
) -> Population | None:
    """Builds data from overrides of `[data]` for a trained model; None without overrides."""
    if not words:
        return None
    config = config_files.load_config(run.folder / CONFIG_FILE, words)
    for name in Config.model_fields:
        same = name == "data" or getattr(config, name) == getattr(run.config, name)
        same |= name in ("execution", "communication")
        checks.require(same, "overrides", "change [data] only", list(words))
    seed = config.data_seed
    population = build_population(config.data, seed, needs_test_labels=needs_test_labels)
    trained = run.experiment.population
    for what, field in (("the classes", "class_names"), ("the inputs", "feature_names")):
        mine, other = getattr(trained, field), getattr(population, field)
        new = [name for name in other if name not in mine]
        rule = f"be those of the training, {checks.shown(mine)}"
        checks.require(mine == other, what, rule, f"also {checks.listed(new)}" if new else other)
    ours, theirs = (
        {name: list(array.shape[1:]) for name, array in each.train.examples.items()}
        for each in (trained, population)
    )
    checks.require(ours == theirs, "the examples", f"have the shapes {ours}", theirs)
    scales, others = (_scales(each.encoding) for each in (trained, population))
    other_scales = [name for name in scales.keys() & others.keys() if scales[name] != others[name]]
    rule = "be encoded by the figures and categories of the training; give new rows by "
    rule += "data.options.test_path, and leave training part and coding as they were"
    checks.require(not other_scales, "columns", rule, sorted(other_scales))
    before = run.config.data
    rule = f"be that of the training, {before.input_norm}"
    is_same = config.data.input_norm == before.input_norm
    checks.require(is_same, "data.input_norm", rule, config.data.input_norm)
    scalings = [each.options.get("scaling") for each in (before, config.data)]
    is_same = before.name != config.data.name or scalings[0] == scalings[1]
    rule = f"be that of the training, {scalings[0]}"
    checks.require(is_same, "data.options.scaling", rule, scalings[1])
    require_vocabulary(config.model, population)
    return population


def _scales(encoding: Encoding | None) -> dict[str, dict[str, Any]]:
    """Returns by column what its cells are encoded by, but for fills and formats that are given."""
    if encoding is None:
        return {}

    def is_scale(column: Mapping[str, Any], fact: str) -> bool:
        return fact in ("range", "mean", "deviation", "categories", *column.get("exact", ()))

    return {
        each["name"]: {fact: value for fact, value in each.items() if is_scale(each, fact)}
        | {"since": entry_of(each, "dates", "since")}
        for each in (*encoding.columns, *encoding.labels)
    }


def evaluate_run(
    run: Run, other: Population | None = None, by_client: str | pathlib.Path | None = None
) -> dict[str, Any]:
    """Evaluates a run's model on held-out data.

    Args:
      run: the run.
      other: data to evaluate the shared model on; None for the run's own held-out data, as its
        `[evaluation]` says.
      by_client: a new file that ends in .jsonl, for the results of each client, as in the file
        `by_client.jsonl` of a run folder; None for none.

    Returns:
      Losses, accuracies, metrics and fairness by name. None of them is private.

    Raises:
      ValueError: if the file cannot be written, or there are no data of clients to evaluate on.
    """
    if by_client is not None:
        files.require_new(by_client, "by_client", (".jsonl",))
    made = run.experiment.evaluator if other is None else _on_others(run, other)
    has_clients = any((made.clients, made.unseen, made.training))
    rule = "be left out: there are no held-out data of clients"
    checks.require(by_client is None or has_clients, "by_client", rule, str(by_client))
    found = evaluate(made, run.state, run.hyper, run.config.run.seed)
    if by_client is not None:
        text = by_client_text(found.parts, other or run.experiment.population)
        pathlib.Path(by_client).parent.mkdir(parents=True, exist_ok=True)
        files.write_text(by_client, text)
    return found.figures


def _on_others(run: Run, other: Population) -> Evaluator:
    """Compiles the evaluations of a run's shared model on other data."""
    metrics = metrics_of(run.config.run.metrics, other.class_names)
    federation = run.experiment.simulation.federation
    return evaluator(
        federation._replace(views=federation.views._replace(personal=None)),
        run.model,
        other.train,
        whole=other.test,
        clients=other.client_test or other.train,
        metrics=metrics,
        unseen=other.unseen,
    )


def predict(model: Model, params: PyTree, data: FederatedData) -> Any:
    """Computes outputs for all examples, `[num_examples, ...]`, on the host."""
    of_block: Callable[..., Any] = jax.jit(model.predict)
    inputs = nested(flat(data.examples))["x"]
    parts = []
    for first in range(0, data.num_examples, _BLOCK):
        block = jax.tree.map(lambda a, first=first: np.asarray(a[first : first + _BLOCK]), inputs)
        parts.append(jax.tree.map(np.asarray, of_block(params, block)))
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)
