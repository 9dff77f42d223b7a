"""The apps of an experiment: a configuration that was simulated, deployed on Flower."""

import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, get_args

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedjax_dp.core import checks, disclosure
from fedjax_dp.core.decimals import shown
from fedjax_dp.core.registry import digest_of_source
from fedjax_dp.engine.evaluation import of_shared
from fedjax_dp.engine.facts import Population as Sizes
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.experiment.assembly.assemble import Parts, checked_config, parts_of
from fedjax_dp.experiment.assembly.own_data import (
    FILE_OPTIONS,
    Registered,
    own_population,
    population_without_records,
    public_test,
    require_own_data,
)
from fedjax_dp.experiment.components.catalogue import own_parts
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.environment import use_compilation_cache
from fedjax_dp.experiment.running.run import Outcome, Watcher, resume, run
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    JOURNAL_FILE,
    NODES_FILE,
    REGISTERED_FILE,
    SCORES_FILE,
)
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.flower.exchange import Scores, ScoresFile
from fedjax_dp.flower.export import require_evaluated, require_server
from fedjax_dp.flower.grid import GridNodes, registered
from fedjax_dp.flower.ledger import Budget
from fedjax_dp.flower.log import LoggedProgress, close
from fedjax_dp.flower.node import client_app
from fedjax_dp.flower.plan import SECTION, SOURCE
from fedjax_dp.flower.request import require_timeout
from fedjax_dp.flower.server import deployed
from fedjax_dp.flower.terms import Keys, Node, Terms, clients_of, require_node_config, script_of
from fedjax_dp.io.journal import JournalFile
from fedjax_dp.io.logbook import write_json
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model

# The sections that a client's round depends on.
_ALIKE = ("model", "algorithm", "training", "participation", "secure_aggregation", "privacy")
# By which the ε of a node may exceed that of the server by rounding.
_SLACK = 1e-9


class OnFlower:
    """A `Deployment` on the nodes of a Flower grid."""

    def __init__(
        self,
        grid: Grid,
        *,
        keys: Keys = "device",
        timeout: float = 600.0,
        own_data: bool = False,
        scores: Scores = "none",
    ) -> None:
        """Wraps a grid."""
        checks.one_of("keys", keys, get_args(Keys))
        require_timeout(timeout)
        checks.one_of("scores", scores, get_args(Scores))
        self._grid, self._keys, self._timeout, self._scores = grid, keys, timeout, scores
        self._own_data, self._journal, self._is_resumed = own_data, _FilesOfRun(), False
        self._facts: Mapping[str, str] = {"keys": keys, "scores": scores}
        # The same of all sessions of a run.
        self._stated = dict(self._facts)
        self._registered: Registered | None = None

    def population(self, config: Config, folder: pathlib.Path | None) -> Population | None:
        """Returns clients of which the server has no records; None if it reads them itself.

        Args:
          config: the experiment; `data.num_clients` is the number of clients to wait for.
          folder: the folder of a run that is resumed, or None.

        Returns:
          The clients, as they registered, before an interruption if the run is resumed.

        Raises:
          ValueError: if the experiment needs the clients' records, parts of it do not fit together,
            data of nodes are not alike, or as `deploy` for the root of the server's noise.
        """
        self._is_resumed = folder is not None
        if folder is not None:
            earlier = JournalFile(folder / CHECKPOINT_FOLDER / JOURNAL_FILE)
            weaker = {"keys": "parity", "scores": "exact"}
            self._stated |= {k: v for k, v in weaker.items() if v in earlier.values(k)}
            if (folder / SCORES_FILE).exists():
                self._stated["scores"] = "exact"
        if not self._own_data:
            return None
        require_own_data(config)
        # Before nodes are waited for.
        checked_config(config)
        require_server(config, self._keys)
        if folder is not None:
            self._registered = Registered.read(folder / CHECKPOINT_FOLDER / REGISTERED_FILE)
        if self._registered is None:
            count = config.data.num_clients
            self._registered = registered(self._grid, count, timeout=self._timeout)
        test = public_test(config, self._registered.kind)
        return population_without_records(self._registered, test)

    def deploy(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with rounds that run on the nodes.

        Args:
          experiment: as it was assembled to be simulated.

        Returns:
          The experiment with another simulation, and a checkpoint of every round. Personal models,
          which stay on their nodes, are not evaluated; the shared model is, if there is one. A
          statement names the server as trusted, and scores, if this holds for any session of a run.

        Raises:
          ValueError: as `deployed`; if privacy is claimed, and nodes that draw keys of their own
            would know the root of the server's noise; or for an evaluation that the server cannot
            make: of clients' own models, or metrics where nothing is evaluated.
        """
        require_server(experiment.config, self._keys)
        federation = experiment.simulation.federation
        require_evaluated(experiment.config, federation, experiment.population)
        rule = "be none in a run whose results are released: no noise protects scores"
        collected = self._stated["scores"]
        is_private = experiment.config.run.release is None or collected == "none"
        checks.require(is_private, "scores", rule, collected)
        sizes, timeout = federation.population.sizes, self._timeout
        scores = self._journal.report if self._scores == "exact" else None
        self.nodes = GridNodes(self._grid, sizes=sizes, timeout=timeout, scores=scores)
        described = described_by(experiment.config, experiment.model)
        there = deployed(
            federation, self.nodes, keys=self._keys, journal=self._journal, described=described
        )
        stated = {**experiment.stated, "deployment": self._stated}
        if self._stated["keys"] == "device" and (masks := stated.get("secure_aggregation")):
            # All masks are made, whatever a simulation leaves out.
            stated["secure_aggregation"] = {**masks, "form": "masked", "keys": "between_nodes"}
        # Saved before its aggregate leaves with the next round, a round is released once.
        section = experiment.config.run.model_copy(update={"checkpoint_every": 1})
        config = experiment.config.model_copy(update={"run": section})
        population, evaluator = experiment.population, of_shared(experiment.evaluator)
        if federation.personal is not None and population.client_test is not None:
            note = "test data of clients are not used: the server does not evaluate clients' models"
            population = population._replace(notes=(*population.notes, note))
        return experiment._replace(
            config=config,
            population=population,
            simulation=there,
            stated=stated,
            evaluator=evaluator,
        )

    def open(self, folder: pathlib.Path, rounds: int) -> Sequence[RoundRecord]:
        """Opens the journal of a run.

        Args:
          folder: the run folder.
          rounds: those of its newest checkpoint.

        Returns:
          The records of all rounds that it has sent, in order.

        Raises:
          ValueError: if the journal of a run that is resumed is missing or damaged, or lacks one of
            these rounds, which would not be charged then.
        """
        if self._registered is not None:
            self._registered.write(folder / CHECKPOINT_FOLDER / REGISTERED_FILE)
        self._journal.file = JournalFile(folder / CHECKPOINT_FOLDER / JOURNAL_FILE, self._facts)
        if not self._is_resumed:
            self._journal.file.make()
        self._journal.file.require(rounds)
        if self._scores == "exact":
            self._journal.scores = ScoresFile(folder / SCORES_FILE)
        return self._journal.file.records()


class _FilesOfRun:
    """Files that are known once the run folder is: the journal, and scores."""

    file: JournalFile
    scores: ScoresFile

    def report(self, clients: Sequence[int], text: str) -> None:
        """Writes the scores in a reply."""
        self.scores.append(clients, text)

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.file.run

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent."""
        self.file.append(round, record)

    def num_attempts(self, round: int) -> int:
        """Counts the earlier attempts of a round."""
        return self.file.num_attempts(round)

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards."""
        return self.file.num_released(round)


def run_on(
    grid: Grid,
    config: Config,
    folder: str | pathlib.Path,
    watcher: Watcher | None = None,
    *,
    keys: Keys = "device",
    timeout: float = 600.0,
    own_data: bool = False,
    scores: Scores = "none",
) -> Outcome:
    """Runs an experiment on the nodes of a grid, or resumes it where the folder holds it.

    Args:
      grid: as Flower passes it to a server app.
      config: the experiment.
      folder: the run folder.
      watcher: receives the progress; None for none.
      keys: "device" or "parity", as for `client_app`.
      timeout: seconds to wait for a first node, and for the replies of a round, above 0 and at most
        12 hours.
      own_data: whether each node reads data of its own, as for `OnFlower`.
      scores: "exact" or "none", as for `OnFlower`.

    Returns:
      The folder, the summary, and why the run ended. Where privacy is claimed for records the
      folder also holds what the nodes' own ledgers claim, at the smallest δ.

    Raises:
      ValueError: as `experiment.run` and `deployed`; or if the folder holds a run of another
        configuration, except for what `experiment.resume` lets change.
    """
    place = pathlib.Path(folder)
    there = OnFlower(grid, keys=keys, timeout=timeout, own_data=own_data, scores=scores)
    if (place / CONFIG_FILE).exists():
        outcome = resume(place, watcher, deployment=there, config=config)
    else:
        outcome = run(config, place, watcher, deployment=there)
    if outcome.ended != "interrupted":
        there.nodes.collect_scores()
    if "record" in config.privacy.units:
        deltas = np.ravel(np.asarray(config.privacy.record.dp_delta, float))
        claims = there.nodes.claims(float(np.min(deltas)))
        if claims:  # None is known where a resumed run had no round left.
            write_json(place / NODES_FILE, {str(client): each for client, each in claims.items()})
        _warn_of(claims, outcome, is_alike=bool(np.ptp(deltas) == 0))
    return outcome


def _warn_of(claims: Mapping[int, Mapping[str, float]], outcome: Outcome, is_alike: bool) -> None:
    """Warns of nodes that claim more than the statement; without their names, which are secret."""
    stated = float(outcome.summary.get("epsilon_record", np.inf))
    largest = max((each["epsilon"] for each in claims.values()), default=0.0)
    if is_alike and largest > stated * (1 + _SLACK):
        claimed, own = (shown("epsilon", each) for each in (largest, stated))
        text = f"nodes claim ε of up to {claimed} for records, more than the run's {own}"
        warnings.warn(f"{text}: their ledgers hold earlier rounds; see {NODES_FILE}", stacklevel=3)


def server_app_of(path: str | pathlib.Path) -> ServerApp:
    """Builds the server app of a configuration.

    Flower's run configuration has `output`, the run folder on the server's machine; and may have
    `keys`, `timeout`, `own-data` and `scores`, as `OnFlower`. A run that was interrupted resumes in
    the same folder. The log has the progress by round and the result; a run that its budget ended
    is shown as failed, with that reason.

    Args:
      path: the TOML file.

    Returns:
      The app.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = context.run_config
        rule = "be in the run configuration: the run folder on the server, an absolute path"
        output = str(given.get("output", ""))
        checks.require(pathlib.Path(output).is_absolute(), "output", rule, output)
        config = load_config(str(path))
        close(run_on(grid, config, output, LoggedProgress(config.run.rounds), **_options(given)))

    return app


def client_app_of(path: str | pathlib.Path) -> ClientApp:
    """Builds the client app of a configuration, whose data each node reads itself.

    The configuration of a node says which clients it holds: `clients`, such as "0-4,9"; or
    `partition-id` and `num-partitions`, for every client whose index leaves that remainder. It may
    have `state-dir`, a folder for client states, `keys`, "device" or "parity", and `data`: the
    absolute path of a file of its own, or a pattern, which is read in place of `data.options.path`,
    as the server's `own-data` expects it. Its clients are those of the node, in the order of their
    names. With `training = "script"` a script of the participant's own trains them, see `project`.
    `experiment` is the absolute path of a TOML file of the node's own, which it uses in place of
    the app's; the server's must be the same in all that a client's round depends on. Another name,
    or a relative path, is refused in an error reply.

    Args:
      path: the TOML file.

    Returns:
      The app.
    """

    on_node = cache(_OnNode)

    def data(context: Context) -> Node:
        require_node_config(context.node_config)
        return on_node(str(context.node_config.get("experiment", path))).node(context)

    def parts_for(node: Node, population: Sizes) -> Parts:
        return on_node(node.experiment).parts_for(node, population)

    def terms(node: Node, population: Sizes) -> Terms:
        parts = parts_for(node, population)
        return terms_of(parts.config, parts.model)

    return client_app(lambda *of_node: parts_for(*of_node).algorithm, data, terms)


class _OnNode:
    """An experiment on a node, of which everything is read and built once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read = cache(lambda file: own_population(self._config, file))
        self._of_registered = cache(
            lambda text: parts_of(
                self._config, population_without_records(Registered(*json.loads(text)))
            )
        )

    @cached_property
    def _config(self) -> Config:
        config = load_config(self._path)
        # Each message has a process of its own, which reads the programs of those before.
        use_compilation_cache(config.execution.compilation_cache)
        return config

    @cached_property
    def _parts(self) -> Parts:
        return parts_of(self._config)

    def node(self, context: Context) -> Node:
        """Reads the clients of a node and their data."""
        given = {
            name.replace("-", "_"): str(context.node_config[name])
            for name in ("state-dir", "keys")
            if name in context.node_config
        }
        script = script_of(context.node_config, self._config.run.rounds)
        of_node: dict[str, Any] = {**given, "script": script, "experiment": self._path}
        if "data" in context.node_config:
            file = str(context.node_config["data"])
            own, kind = self._read(file)
            clients = clients_of(context.node_config, self._config.data.num_clients)
            rule = f"hold the {len(clients)} clients {clients} of this node"
            fits = own.train.num_clients == len(clients)
            disclosure.require_of_file(fits, file, rule, list(own.train.client_names))
            return Node(clients, own.train, own.validation, kind=kind, **of_node)
        whole = self._parts.population
        clients = clients_of(context.node_config, whole.train.num_clients)
        second = None if whole.validation is None else whole.validation.select(clients)
        return Node(clients, whole.train.select(clients), second, **of_node)

    def parts_for(self, node: Node, population: Sizes) -> Parts:
        """Builds the parts of the experiment for the registered sizes of all clients."""
        if not node.kind:
            return self._parts
        sizes, second = population.sizes.tolist(), population.validation
        second_sizes = [] if second is None else second.sizes.tolist()
        return self._of_registered(json.dumps([node.kind, sizes, second_sizes]))


def terms_of(config: Config, model: Model | None = None) -> Terms:
    """Returns what a node requires that takes part in an experiment."""
    return Terms(budget_of(config), described_by(config, model), config.run.rounds)


def described_by(config: Config, model: Model | None = None) -> dict[str, str]:
    """Describes what both sides must have alike: sections, imported files, frozen parameters."""
    base = "" if model is None else kinds.digest(model.frozen)
    data = {**config.data.model_dump(mode="json"), "data_dir": None}
    # Files are where each machine has them.
    data["options"] = {n: x for n, x in data["options"].items() if n not in FILE_OPTIONS}
    sections = {name: getattr(config, name).model_dump(mode="json") for name in _ALIKE}
    return {
        **{
            f"{SECTION}{name}": json.dumps(section, sort_keys=True)
            for name, section in {**sections, "data": data}.items()
        },
        **{f"{SOURCE}{name}": digest_of_source(name) for name in own_parts(config)},
        **({"SHA-256 of frozen parameters": base} if base else {}),
    }


def budget_of(config: Config) -> Budget | None:
    """Returns the budget of the records of each client; None for none."""
    level = config.privacy.record
    if "record" not in config.privacy.units or level.epsilon is None:
        return None
    return Budget(level.epsilon, level.dp_delta, **config.privacy.promise)  # type: ignore[arg-type]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the options of `OnFlower` from Flower's run configuration."""
    own_data, timeout = given.get("own-data", False), given.get("timeout", 600.0)
    checks.require(isinstance(own_data, bool), "own-data", "be true or false", own_data)
    checks.numbers("timeout", "be a number of seconds", timeout)
    found: dict[str, Any] = {"own_data": own_data, "timeout": float(timeout)}
    return found | {name: str(given[name]) for name in ("keys", "scores") if name in given}
