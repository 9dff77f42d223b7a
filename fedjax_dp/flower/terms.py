"""The clients of a node, and what it requires of the rounds that it takes part in."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.flower.ledger import Budget

Keys = Literal["device", "parity"]


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
