"""The shape that every algorithm has: a declaration of pure functions, without a loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Aggregator


class ClientOutput(NamedTuple):
    """What one client's round ends with.

    Attributes:
      update: what leaves the client; the aggregator reads it.
      weight: the client's weight, float32; not negative.
      row: the client's new state, kept for its next round.
      metrics: scalars for people; exact, not private.
    """

    update: PyTree
    weight: jax.Array
    row: PyTree
    metrics: dict[str, jax.Array]


class Stages(NamedTuple):
    """The kinds of round of an algorithm that changes its ways in the course of a run.

    Which kind a round is, is traced data: going from one to the next compiles nothing.

    Attributes:
      of: `(server, round) -> int32`, the kind of that round; both count from 0. It must be
        right for the round that the server's state stands before, and for later ones it must
        foresee no less cost than any course that the run may take.
      record_events: for each kind, `(size, config) -> DpEvent` of what one record of a
        participating client pays in such a round; empty where nothing is claimed for records.
    """

    of: Callable[[PyTree, Any], Any]
    record_events: tuple[Callable[[int, LocalConfig], Any], ...] = ()


class HostStep(NamedTuple):
    """Work on the host between two rounds, such as fitting a mixture with a library.

    The engine takes it as the last part of its round: a state that `Simulation.run` returns, or
    that a checkpoint holds, has it behind it.

    Attributes:
      after: how many rounds are done when it runs, at least 1.
      step: `(server, rows, key) -> (server, rows)` on NumPy arrays, of unchanged structure, shapes
        and types, and a function of its arguments alone; the key is used for nothing else. What it
        reads must be private already: no event is charged.
      reads_rows: whether it is handed what clients keep, which is private for records where
        training is, and never private for clients; `rows` is None, in and out, where not.
    """

    after: int
    step: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree]]
    reads_rows: bool = True


class FederatedAlgorithm(NamedTuple):
    """Declares a federated algorithm; the engine compiles its round.

    Attributes:
      name: the algorithm's name in reports.
      init: `(key) -> server`, the server's state: models, optimiser states, whatever is kept.
      client: `(server, row, client, config, key) -> ClientOutput`, one client's whole round, from
        what it is sent to what it returns. Where privacy is claimed for records it is handed a
        `PublicClient`, which a trainer and a choice can open and it cannot.
      aggregator: how the cohort's updates become one aggregate.
      server_step: `(server, aggregate, round) -> server`.
      config: the numbers of local training, traced.
      num_steps: `(size, config) -> steps` of a client, by which clients of like length are grouped.
      model_of: `(server) -> params`, the model that is evaluated for the whole population; None
        where there is no such model.
      init_row: `(server) -> row`, one client's state before its first round; None where clients
        keep nothing.
      personal_model_of: `(server, row, client) -> params`, the model that one client would use;
        None where it is the server's.
      record_event: `(size, config) -> DpEvent` of what one record of a participating client pays in
        a round; None where nothing is claimed for records.
      sends_updates: whether anything leaves a client at all.
      stages: the kinds of round, where they differ in what is charged; `record_event` then is that
        of local training alone.
      host_steps: what is done on the host between rounds.
      not_covered: what leaves a client without any protection, in words that a privacy statement
        repeats; None where the events cover everything that is sent.
      check_noised: raises a ValueError if noise on updates would move what training leaves alone;
        the engine asks where the aggregator adds some. That of the trainer; None where what is sent
        is no update of a model.
    """

    name: str
    init: Callable[[Any], PyTree]
    client: Callable[..., ClientOutput]
    aggregator: Aggregator
    server_step: Callable[[PyTree, PyTree, jax.Array], PyTree]
    config: LocalConfig
    num_steps: Callable[[Any, LocalConfig], Any]
    model_of: Callable[[PyTree], PyTree] | None
    init_row: Callable[[PyTree], PyTree] | None = None
    personal_model_of: Callable[..., PyTree] | None = None
    record_event: Callable[[int, LocalConfig], Any] | None = None
    sends_updates: bool = True
    stages: Stages | None = None
    host_steps: tuple[HostStep, ...] = ()
    not_covered: str | None = None
    check_noised: Callable[[], None] | None = None
