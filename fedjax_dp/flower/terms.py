"""The clients of a node, its configuration, and what it requires of rounds."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from fedjax_dp.core import disclosure
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.flower.exchange import FOLDER, Scores
from fedjax_dp.flower.ledger import Budget

Keys = Literal["device", "parity"]
_PARTITION = ("partition-id", "num-partitions")
_MOST_DIGITS = 100
# They are read by processes that Flower starts, wherever it does.
_PATHS = ("data", "state-dir", "experiment")
_CHOICES = {"keys": get_args(Keys), "training": ("package", "script"), "scores": get_args(Scores)}
_NAMES = ("clients", *_PARTITION, *_PATHS, *_CHOICES)


class Script(NamedTuple):
    """Training of a node's clients by a script, through a folder; see `project`.

    Attributes:
      folder: the folder that node and script share.
      rounds: the rounds of the experiment; None if unknown.
      sends_scores: whether reported scores may leave the node, for a server that collects them.
    """

    folder: str | pathlib.Path
    rounds: int | None = None
    sends_scores: bool = False


class Node(NamedTuple):
    """The clients of a node and their data.

    Attributes:
      clients: their indices in the population, which no other node has.
      train: their training examples, in the order of `clients`.
      validation: a second split of the same clients, or None.
      keys: "device" to draw keys on this node; "parity" to use those of the server, for tests.
      state_dir: a folder for client states, and for the ledger of records; None, which privacy of
        records refuses, to store states in Flower's context, which the end of the node's process
        deletes.
      kind: what must be the same for the data of all nodes, for JSON; the server compares it if
        it has no data of its own.
      script: a script of the participant's own that trains the clients; None to train here.
      experiment: which algorithm `build` makes, where an app has several.
    """

    clients: Sequence[int]
    train: FederatedData
    validation: FederatedData | None = None
    keys: Keys = "device"
    state_dir: str | pathlib.Path | None = None
    kind: Mapping[str, Any] = {}
    script: Script | None = None
    experiment: str = ""


class Terms(NamedTuple):
    """What a node requires of the rounds that it takes part in, besides its algorithm.

    Attributes:
      budget: of the records of its clients; a round that would exceed it is refused. None for no
        bound.
      described: what neither numbers nor shapes of the algorithm show, by name; that of the
        server must be the same.
      rounds: how many the run has; later ones are refused. None if the node does not know.
    """

    budget: Budget | None = None
    described: Mapping[str, str] = {}
    rounds: int | None = None


def sizes_of(node: Node) -> dict[str, list[int]]:
    """Returns the sizes of a node's clients, as facts of a message."""
    second = [] if node.validation is None else node.validation.sizes.tolist()
    return {"sizes": node.train.sizes.tolist(), "validation sizes": second}


def require_node_config(config: Mapping[str, Any]) -> None:
    """Requires names that are read, absolute paths, and one of the choices where there are some."""
    for name in config:
        disclosure.one_of("a name in node-config", name, _NAMES)
    for name in _PATHS:
        path = str(config.get(name, "/"))
        rule = "be an absolute path"
        disclosure.require(pathlib.Path(path).is_absolute(), f"node-config {name}", rule, path)
    for name, choices in _CHOICES.items():
        if name in config:
            disclosure.one_of(f"node-config {name}", str(config[name]), choices)


def clients_of(config: Mapping[str, Any], num_clients: int) -> list[int]:
    """Reads which clients a node holds."""
    of_partition = [name for name in _PARTITION if name in config]
    if "clients" in config:
        rule = "hold clients, or partition-id and num-partitions, not both"
        disclosure.require(not of_partition, "node-config", rule, dict(config))
        return _listed(str(config["clients"]), num_clients)
    rule = "hold clients, or partition-id and num-partitions"
    disclosure.require(len(of_partition) == len(_PARTITION), "node-config", rule, dict(config))
    own, parts = (_index(f"node-config {name}", config[name]) for name in _PARTITION)
    disclosure.require(parts >= 1, "node-config num-partitions", "be at least 1", parts)
    most = min(parts, num_clients) - 1
    disclosure.require(own <= most, "node-config partition-id", f"be from 0 to {most}", own)
    return [i for i in range(num_clients) if i % parts == own]


def script_of(config: Mapping[str, Any], rounds: int) -> Script | None:
    """Reads who trains the clients of a node; None for the package."""
    if config.get("training", "package") == "package":
        return None
    rule = "hold state-dir, the folder that the node and a training script share"
    disclosure.require("state-dir" in config, "node-config", rule, dict(config))
    folder = pathlib.Path(str(config["state-dir"])) / FOLDER
    return Script(folder, rounds, sends_scores=config.get("scores") == "exact")


def _listed(text: str, num_clients: int) -> list[int]:
    """Reads a list such as "0-4,9" of clients of a population."""
    clients: set[int] = set()
    for part in text.split(","):
        numbers = part.strip().split("-")
        rule = "be numbers and ranges, such as 0-4,9"
        is_range = len(numbers) <= 2 and all(_is_number(each) for each in numbers)
        is_range = is_range and int(numbers[0]) <= int(numbers[-1])
        disclosure.require(is_range, "node-config clients", rule, text)
        rule = f"be from 0 to {num_clients - 1}, as the population has {num_clients} clients"
        fits = int(numbers[-1]) < num_clients
        disclosure.require(fits, "node-config clients", rule, part.strip())
        clients |= set(range(int(numbers[0]), int(numbers[-1]) + 1))
    return sorted(clients)


def _index(name: str, value: Any) -> int:
    """Reads a whole number, with or without quotes."""
    disclosure.require(_is_number(str(value)), name, "be a whole number", value)
    return int(value)


def _is_number(text: str) -> bool:
    """Whether a text is a whole number that Python reads."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS
