"""What wrappers change, and which goes around which: one table, from which refusals follow."""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedjax_dp.core import argument_checks, checks


class Change(enum.Enum):
    """What a wrapper may change of a federation.

    Attributes:
      COHORTS: who takes part in a round.
      MESSAGES: what clients receive or send.
      TIME: the simulated time of rounds.
      CLIENT_STATES: what clients remember from round to round.
      SERVER_STEP: the server's model after a round.
      SEVERAL_SERVERS: each of several servers has a model of its own.
      NO_SERVER: clients send their messages to each other.
    """

    COHORTS = "who takes part"
    MESSAGES = "messages"
    TIME = "the time of rounds"
    CLIENT_STATES = "client states"
    SERVER_STEP = "the server's step"
    SEVERAL_SERVERS = "several servers"
    NO_SERVER = "no server"


class Wrapper(NamedTuple):
    """What a wrapper says about itself, for those that are applied after it and before it.

    Attributes:
      name: of the function that wraps.
      changes: what it changes of a federation; everything if it does not say.
      needs: what wrappers inside it must not have changed, each with the rule for a federation that
        an error gives, such as "have one server".
    """

    name: str
    changes: frozenset[Change] = frozenset(Change)
    needs: Mapping[Change, str] = {}

    def refusal(self, inner: "Wrapper") -> str | None:
        """Finds out whether it goes around another one.

        Args:
          inner: the other one, which was applied before it.

        Returns:
          The rule by which it does not; None if it does.
        """
        rules = (rule for change, rule in self.needs.items() if change in inner.changes)
        once = f"be wrapped by {self.name}() once" if inner.name == self.name else None
        return next(rules, once)

    def require_around(self, wrappers: Iterable["Wrapper"]) -> None:
        """Refuses a federation with wrappers that it does not go around.

        Args:
          wrappers: those of the federation.

        Raises:
          ValueError: for the first of them, or for what this wrapper says itself.
        """
        argument_checks.check_fields(self, "wrapper.")
        said = {*self.changes, *self.needs}
        declared = "have values of Change as its changes and the keys of its needs"
        checks.require(all(isinstance(one, Change) for one in said), "wrapper", declared, said)
        for inner in wrappers:
            rule = self.refusal(inner)
            checks.require(rule is None, "federation", rule or "", f"{inner.name}()")


# A wrapper that replaces parts of a federation and says nothing about itself.
UNDECLARED = Wrapper("a wrapper that declares nothing, see Federation.wrapped")

_EVERY_PART = "be as federation() returned it; other wrappers are applied to asynchronous rounds"
_ONE_STATE = "have no wrapper of its own, whose state would be that of one server"
_ONE_SERVER = "have one server"

ASYNCHRONOUS = Wrapper(
    "asynchronous",
    frozenset({Change.COHORTS, Change.MESSAGES, Change.TIME, Change.SERVER_STEP}),
    dict.fromkeys(Change, _EVERY_PART),
)
SEVERAL_SERVERS = Wrapper(
    "several_servers",
    frozenset({Change.SEVERAL_SERVERS}),
    {
        Change.NO_SERVER: "have a server",
        Change.TIME: _ONE_STATE,
        Change.CLIENT_STATES: _ONE_STATE,
        Change.SERVER_STEP: _ONE_STATE,
    },
)
SERVERLESS = Wrapper(
    "serverless",
    frozenset({Change.NO_SERVER}),
    {
        Change.SEVERAL_SERVERS: "have one model for all clients",
        Change.TIME: "be inside the clock, which then has no server, deadline or keep",
    },
)
CLOCKED = Wrapper(
    "clocked",
    frozenset({Change.TIME}),
    {Change.TIME: "have no clock of its own: the outer one would replace its numbers"},
)
LEAVING = Wrapper(
    "leaving",
    frozenset({Change.COHORTS, Change.SERVER_STEP}),
    {
        Change.SEVERAL_SERVERS: f"{_ONE_SERVER}, with whose model those of clients are compared",
        Change.SERVER_STEP: "have the mean of the clients' models as its model, which they compare",
        Change.CLIENT_STATES: "leave the models that clients send as they are: they are compared",
    },
)
_FULLER = "be accelerated around it, since acceleration asks whether all clients take part"
WITHIN_BUDGETS = Wrapper(
    "within_budgets",
    frozenset({Change.COHORTS}),
    {
        Change.COHORTS: "draw its cohorts by its sampling alone, of which clients are left out",
        Change.NO_SERVER: "have a server: without one, a client that is left out has no model",
        Change.SERVER_STEP: _FULLER,
        Change.CLIENT_STATES: _FULLER,
    },
)
_OLDER = "have rounds that map one model to the next: clients at work train older ones"
ANDERSON = Wrapper(
    "anderson",
    frozenset({Change.SERVER_STEP}),
    {Change.SEVERAL_SERVERS: f"{_ONE_SERVER}, whose model is accelerated", Change.MESSAGES: _OLDER},
)
ANDERSON_OF_CLIENTS = ANDERSON._replace(
    changes=frozenset({Change.CLIENT_STATES}), needs={Change.MESSAGES: _OLDER}
)
# All of this package, outermost first where several of one run go together.
BUILT_IN = (
    CLOCKED,
    SEVERAL_SERVERS,
    SERVERLESS,
    LEAVING,
    ANDERSON,
    ANDERSON_OF_CLIENTS,
    WITHIN_BUDGETS,
    ASYNCHRONOUS,
)
