"""What the step of a wrapper does beside the one round that is paid for, found by tracing it."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import SequenceKey

from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.marks import Reached, marks_reaching
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import priced
from fedjax_dp.engine.round import ByClient, Unpublished

_STEP = "the step of a wrapper, where privacy is claimed,"
# The names of what a round returns; those of what it receives begin with the part.
_RELEASED, _STAGE, _DIGEST, _AFTER = "released", "record stage", "record digest", "after "
_NUMBERS = itertools.count()
Step = Callable[..., Any]
# State, hyper, examples, cohort and key of a round.
_Inputs: TypeAlias = tuple[Any, Any, Any, Any, Any]
# The names of the arrays of which an array is one, whichever was chosen.
_Names: TypeAlias = frozenset[str]
_COMPUTED = frozenset({"a result of operations"})


def _own_prefix() -> str:
    """Makes a prefix of names that no other step has."""
    return f"fedjax_dp: round {next(_NUMBERS)}: "


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """A step that names the arrays of its round, by which a trace of a wrapper shows them.

    A name is no operation, and always there: caches of traces know of no trial.
    """

    run: Step
    prefix: str = dataclasses.field(default_factory=_own_prefix)

    def __call__(
        self,
        state: Any,
        hyper: Any,
        examples: Any,
        cohort: Any,
        key: Any,
        layout: Layout = Layout(),
    ) -> Any:
        """Runs the round."""
        inputs = (state, hyper, examples, cohort, key)
        leaves, structure = jax.tree.flatten(inputs)
        names = [f"{self.prefix}{name}" for name in _names_of(inputs)]
        named = map(_named, leaves, names)
        after, record, info = self.run(*jax.tree.unflatten(structure, named), layout)
        record = record._replace(
            stage=_named(jnp.asarray(record.stage), f"{self.prefix}{_STAGE}"),
            digest=_named(record.digest, f"{self.prefix}{_DIGEST}"),
        )
        leaves, structure = jax.tree.flatten(after)
        are_own = jax.tree.leaves(_unpublished(after))
        returned = [
            _named(jnp.asarray(leaf), f"{self.prefix}{_AFTER}{name}" if is_own else self.released)
            for leaf, name, is_own in zip(leaves, _names_of((after,)), are_own, strict=True)
        ]
        return jax.tree.unflatten(structure, returned), record, info

    @property
    def released(self) -> str:
        """The name of what the round shows, noise included."""
        return f"{self.prefix}{_RELEASED}"


def of_one_round(
    run: Step, paid: Watched, *, are_cohorts_secret: Callable[[], bool], adds_shares: bool
) -> Step:
    """Makes a step that is refused if it costs more than the round that a ledger charges for it.

    Guarantee: it calls that round, `paid`, at most once, with what the price is of, and with
    examples and client states, as it received them. Of client states and what the aggregator keeps
    it returns the round's, or those that it received. Nothing else that it passes on or keeps is
    computed from examples, client states, what the aggregator keeps or metrics, nor from the cohort
    where cohorts are secret. It cannot be seen whether it closes over data of its own, computes
    noise anew from the key, or calls back to the host. `adds_shares` says that clients add noise in
    shares, so that fates set how much there is.
    """

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        inputs = (state, hyper, examples, cohort, key)
        traced = jax.make_jaxpr(lambda *x: run(*x, layout)[:2], return_shape=True)
        closed, results = traced(*inputs)
        are_secret = are_cohorts_secret()
        marked = _marked(inputs, are_secret=are_secret)
        reached = marks_reaching(closed, jax.tree.leaves(marked), paid.prefix, ends=paid.released)
        names = _names_of(inputs)
        shapes = dict(zip(names, map(jnp.shape, jax.tree.leaves(inputs)), strict=True))
        outputs, passed = _calls(
            closed, [frozenset({name}) for name in names], paid.prefix, reached.choices
        )
        after, record = jax.tree.unflatten(jax.tree.structure(results), outputs)
        _require_one_call(passed, shapes)
        paid_for = _paid_for(inputs, is_fate_paid_for=are_secret or adds_shares)
        changed = {one.wanted for one in passed if one.received != {one.wanted}}
        others = sorted(name for name in changed if name in paid_for or name not in shapes)
        rule = "pass on what the round costs as it received it"
        checks.require(not others, _STEP, rule, f"a different {', '.join(others)}")
        if passed:
            _require_same_price(record, has_digest=results[1].digest is not None)
        _require_own_states(after)
        _require_released_only(results, reached, changed, are_secret=are_secret)
        return run(*inputs, layout)

    return step


def _named(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.Array):
        return checkpoint_name(leaf, name)
    if leaf is not None:
        # A number that is known stays known.
        checkpoint_name(jnp.zeros(()), name)
    return leaf


def _names_of(part: PyTree) -> list[str]:
    """Names the leaves of inputs, or of a state alone."""
    num_outer = len(part[0].outer)
    return [_name(path, num_outer) for path, _ in jax.tree.leaves_with_path(part)]


def _name(path: Any, num_outer: int) -> str:
    """Names a leaf; states of wrappers count from the innermost, whose place no wrapper moves."""
    first, *rest = path
    if first.idx == 0 and getattr(rest[0], "name", "") == "outer":
        rest[1] = SequenceKey(rest[1].idx - num_outer)
    return ("state", "hyper", "examples", "cohort", "key")[first.idx] + jax.tree_util.keystr(
        tuple(rest)
    )


def _all_of(part: PyTree, *, are_marked: bool) -> PyTree:
    return jax.tree.map(lambda _: are_marked, part)


def _unpublished(state: Any) -> Any:
    """Says of each array of a state whether it stays with clients, or shows them without noise."""
    kinds = ByClient, Unpublished
    outer = jax.tree.map(
        lambda part: _all_of(part, are_marked=isinstance(part, kinds)),
        state.outer,
        is_leaf=lambda part: isinstance(part, kinds),
    )
    own = {
        name: _all_of(getattr(state, name), are_marked=True) for name in ("clients", "aggregator")
    }
    return _all_of(state, are_marked=False)._replace(**own, outer=outer)


def _kept(state: Any) -> Any:
    """Leaves out of a state what a wrapper may change: the server's part and wrappers' states."""
    outer = jax.tree.map(
        lambda part: part if isinstance(part, Unpublished) else None,
        state.outer,
        is_leaf=lambda part: isinstance(part, Unpublished),
    )
    return state._replace(server=None, outer=outer)


def _marked(inputs: _Inputs, *, are_secret: bool) -> PyTree:
    """Says of each array of a round whether it shows what no ledger charges for."""
    state, hyper, examples, cohort, key = inputs
    return (
        _unpublished(state),
        _all_of(hyper, are_marked=False),
        _all_of(examples, are_marked=True),
        _all_of(cohort, are_marked=are_secret),
        _all_of(key, are_marked=False),
    )


class _Passed(NamedTuple):
    """An array that a round received: what it should be, what it is, and its shape."""

    wanted: str
    received: _Names
    shape: tuple[int, ...]


def _require_one_call(passed: Sequence[_Passed], shapes: Mapping[str, tuple[int, ...]]) -> None:
    calls = collections.Counter(one.wanted for one in passed)
    rule = "call the step that it wraps at most once a round, in no loop and not under vmap"
    is_whole = all(one.shape == shapes.get(one.wanted, one.shape) for one in passed)
    checks.require(max(calls.values(), default=0) <= 1 and is_whole, _STEP, rule, "more")


def _paid_for(inputs: _Inputs, *, is_fate_paid_for: bool) -> set[str]:
    """Names what a round must receive as it is.

    Where cohorts are secret, a fate that depends on other clients would show who they are.
    """
    state, hyper, examples, cohort, key = inputs
    state = _kept(state)
    cohort = cohort if is_fate_paid_for else cohort._replace(fate=None)
    return set(_names_of((state, priced(hyper), examples, cohort, key)))


def _require_same_price(record: Any, *, has_digest: bool) -> None:
    """Requires of the names in a record that its round wrote them."""
    fits = record.stage == {_STAGE} and (not has_digest or record.digest == {_DIGEST})
    rule = "return stage and digest of the record that it received"
    checks.require(fits, _STEP, rule, "different ones")


def _require_own_states(after: Any) -> None:
    """Requires client states and what the aggregator keeps to be the round's, or as received."""
    own = _kept(after)._replace(round=None)
    changed = [
        name
        for name, found in zip(_names_of((own,)), jax.tree.leaves(own), strict=True)
        if not found <= {name, f"{_AFTER}{name}"}
    ]
    rule = "return client states and what the aggregator keeps as received, or as its round did"
    checks.require(not changed, _STEP, rule, f"a different {', '.join(changed)}")


def _require_released_only(
    results: Any, reached: Reached, changed: set[str], *, are_secret: bool
) -> None:
    """Requires that what a server keeps is computed from what rounds release alone."""
    after, record = results
    are_own = jax.tree.leaves((_unpublished(after), _all_of(record, are_marked=True)))
    is_kept = any(x and not is_own for x, is_own in zip(reached.outputs, are_own, strict=True))
    # What is passed on as it was received may be marked.
    passed = [name for name in reached.names if name in changed]
    sources = "examples, client states or metrics" + (", or from the cohort" * are_secret)
    rule = f"compute nothing of the server's state or of its own from {sources}"
    value = f"a value{' of ' * bool(passed)}{', '.join(passed)} that depends on them"
    if reached.unknown:
        value = f"one with {', '.join(reached.unknown)}, through which this cannot be followed"
    checks.require(not is_kept and not passed, _STEP, rule, value)


def _calls(
    closed: jaxprs.ClosedJaxpr, inputs: Sequence[_Names], prefix: str, choices: frozenset[int]
) -> tuple[list[_Names], list[_Passed]]:
    """Follows inputs by name; returns the names of outputs, and what was passed to rounds.

    `choices` are equations that choose by what no ledger charges for.
    """
    passed: list[_Passed] = []

    def follow(eqn: jaxprs.JaxprEqn, *names: _Names) -> list[_Names]:
        name = _name_in(eqn, prefix)
        if name == _RELEASED:
            return [_COMPUTED]
        if name in (_STAGE, _DIGEST) or (name or "").startswith(_AFTER):
            return [frozenset({str(name)})]
        if name is not None:
            aval: Any = eqn.outvars[0].aval
            passed.append(_Passed(name, names[0], aval.shape))
        if eqn.primitive.name == "name":
            return [names[0]]
        if eqn.primitive.name == "select_n" and id(eqn) not in choices:
            return [_any_of(names[1:])]
        match jaxprs.layout(eqn):
            case jaxprs.Call(body):
                outputs, inner = _calls(body, names, prefix, choices)
                passed.extend(inner)
                return outputs
            case jaxprs.Cond(branches):
                each = [_calls(b, names[1:], prefix, choices) for b in branches]
                most = max((inner for _, inner in each), key=len)
                passed.extend(most)
                others = [one for _, inner in each if inner is not most for one in inner]
                passed.extend(one for one in others if one.received != {one.wanted})
                if id(eqn) in choices:
                    return [_COMPUTED] * len(eqn.outvars)
                return [_any_of(found) for found in zip(*(o for o, _ in each), strict=True)]
        for body in jaxprs.inner_jaxprs(eqn):
            # A loop, or what is not known, may call it any number of times.
            _, inner = _calls(body, [_COMPUTED] * len(body.jaxpr.invars), prefix, choices)
            passed.extend(inner * 2)
        return [_COMPUTED] * len(eqn.outvars)

    outputs = jaxprs.evaluate(
        closed, inputs, follow, literal=lambda v: _COMPUTED, constant=lambda value: _COMPUTED
    )
    return outputs, passed


def _any_of(names: Sequence[_Names]) -> _Names:
    return frozenset().union(*names)


def _name_in(eqn: jaxprs.JaxprEqn, prefix: str) -> str | None:
    names = (value for value in eqn.params.values() if isinstance(value, str))
    return next((n.removeprefix(prefix) for n in names if n.startswith(prefix)), None)
