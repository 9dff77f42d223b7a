"""What the step of a wrapper does beside the one round that is paid for, found by tracing it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.marks import marks_reaching, released
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import priced
from fedjax_dp.engine.round import ByClient

_STEP = "the step of a wrapper, where privacy is claimed,"
Step = Callable[..., Any]
# State, hyper, examples, cohort and key of a round.
_Inputs = tuple[Any, Any, Any, Any, Any]


def watched(run: Step, level: int) -> Step:
    """Names what a round receives, so that it is seen where a wrapper of it is traced.

    A name is no operation, and always there: caches of traces know of no trial. `level` is the
    number of wrappers around the algorithm.
    """

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        given = (state, hyper, examples, cohort, key)
        paths, structure = jax.tree.flatten_with_path(given)
        named = [_named(leaf, f"{_prefix(level)}{_name(path)}") for path, leaf in paths]
        after, record, info = run(*jax.tree.unflatten(structure, named), layout)
        prefix = f"{_prefix(level)}record "
        record = record._replace(
            stage=checkpoint_name(jnp.asarray(record.stage), f"{prefix}stage"),
            digest=_named(record.digest, f"{prefix}digest"),
        )
        kept = jax.tree.map(
            lambda x, is_own: x if is_own else released(jnp.asarray(x)), after, _unpublished(after)
        )
        return kept, record, info

    return step


def of_one_round(run: Step, level: int, are_cohorts_secret: Callable[[], bool]) -> Step:
    """Makes a step that is refused if it costs more than the round that a ledger charges for it.

    Guarantee: it calls the round of that level at most once, with what the price is of, and with
    examples and client states, as it received them. Nothing else that it passes on or keeps is
    computed from examples, client states, what the aggregator keeps or metrics, nor from the cohort
    where cohorts are secret. It cannot be seen whether it closes over data of its own, computes
    noise anew from the key, or calls back to the host.
    """

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        inputs = (state, hyper, examples, cohort, key)
        traced = jax.make_jaxpr(lambda *x: run(*x, layout)[:2], return_shape=True)
        closed, (after, record) = traced(*inputs)
        are_secret = are_cohorts_secret()
        _require_one_call(closed, inputs, after, record, level, are_secret=are_secret)
        _require_released_only(closed, inputs, after, record, level, are_secret=are_secret)
        return run(*inputs, layout)

    return step


def _prefix(level: int) -> str:
    return f"fedjax_dp: received by round {level}: "


def _named(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.Array):
        return checkpoint_name(leaf, name)
    if leaf is not None:
        # A number that is known stays known.
        checkpoint_name(jnp.zeros(()), name)
    return leaf


def _name(path: Any) -> str:
    first, *rest = path
    return ("state", "hyper", "examples", "cohort", "key")[first.idx] + jax.tree_util.keystr(
        tuple(rest)
    )


def _names_of(part: PyTree) -> list[str]:
    return [_name(path) for path, _ in jax.tree.leaves_with_path(part)]


def _unpublished(state: Any) -> Any:
    """Says of each array of a state whether it stays with clients, or shows them without noise."""

    def of(part: PyTree, *, is_own: bool) -> PyTree:
        return jax.tree.map(lambda _: is_own, part)

    outer = jax.tree.map(
        lambda part: of(part, is_own=isinstance(part, ByClient)),
        state.outer,
        is_leaf=lambda part: isinstance(part, ByClient),
    )
    own = {name: of(getattr(state, name), is_own=True) for name in ("clients", "aggregator")}
    return of(state, is_own=False)._replace(**own, outer=outer)


def _paid_for(inputs: _Inputs, *, are_secret: bool) -> set[str]:
    """Names what a round must receive as it is.

    Where cohorts are secret, a fate that depends on other clients would show who they are.
    """
    state, hyper, examples, cohort, key = inputs
    state = state._replace(server=None, outer=None)
    cohort = cohort if are_secret else cohort._replace(fate=None)
    return set(_names_of((state, priced(hyper), examples, cohort, key)))


class _Passed(NamedTuple):
    """An array that a round received: what it should be, what it is, and its shape."""

    wanted: str
    received: str | None
    shape: tuple[int, ...]


def _require_one_call(
    closed: jaxprs.ClosedJaxpr,
    inputs: _Inputs,
    after: Any,
    record: Any,
    level: int,
    *,
    are_secret: bool,
) -> None:
    names = _names_of(inputs)
    shapes = {n: jnp.shape(x) for n, x in zip(names, jax.tree.leaves(inputs), strict=True)}
    outputs, passed = _calls(closed, names, _prefix(level))
    num_calls = max(
        [0, *(sum(one.wanted == name for one in passed) for name in {p.wanted for p in passed})]
    )
    rule = "call the step that it wraps at most once a round, in no loop and not under vmap"
    is_whole = all(one.shape == shapes.get(one.wanted, one.shape) for one in passed)
    checks.require(num_calls <= 1 and is_whole, _STEP, rule, "more")
    paid_for = _paid_for(inputs, are_secret=are_secret)
    changed = {
        one.wanted
        for one in passed
        if one.received != one.wanted and (one.wanted in paid_for or one.wanted not in shapes)
    }
    changed -= {"record stage", "record digest"}
    rule = "pass on what the round costs as it received it"
    checks.require(not changed, _STEP, rule, f"another {', '.join(sorted(changed))}")
    if passed:
        _, of_record = jax.tree.unflatten(jax.tree.structure((after, record)), outputs)
        rule = "return stage and digest of the record that it received"
        are_same = of_record.stage == "record stage" and of_record.digest in (None, "record digest")
        is_digest = record.digest is None or of_record.digest == "record digest"
        checks.require(are_same and is_digest, _STEP, rule, "others")


def _require_released_only(
    closed: jaxprs.ClosedJaxpr,
    inputs: _Inputs,
    after: Any,
    record: Any,
    level: int,
    *,
    are_secret: bool,
) -> None:
    """Requires that what a server keeps is computed from what rounds release alone."""
    state, hyper, examples, cohort, key = inputs

    def all_of(part: PyTree, *, are_marked: bool) -> PyTree:
        return jax.tree.map(lambda _: are_marked, part)

    marked = (
        _unpublished(state),
        all_of(hyper, are_marked=False),
        all_of(examples, are_marked=True),
        all_of(cohort, are_marked=are_secret),
        all_of(key, are_marked=False),
    )
    reached = marks_reaching(closed, jax.tree.leaves(marked), _prefix(level))
    own = dict(zip(_names_of(inputs), jax.tree.leaves(marked), strict=True))
    # What is passed on as it was received may be marked.
    passed = [name for name in reached.names if not own.get(name, name.startswith("record"))]
    are_own = jax.tree.leaves((_unpublished(after), all_of(record, are_marked=True)))
    is_kept = any(x and not is_own for x, is_own in zip(reached.outputs, are_own, strict=True))
    sources = "examples, client states or metrics" + (", or from the cohort" * are_secret)
    rule = f"compute nothing of the server's state or of its own from {sources}"
    unknown = f"one with {', '.join(reached.unknown)}, through which this cannot be followed"
    value = (
        unknown if reached.unknown else f"one that does{' in ' * bool(passed)}{', '.join(passed)}"
    )
    checks.require(not is_kept and not passed, _STEP, rule, value)


def _calls(
    closed: jaxprs.ClosedJaxpr, inputs: Sequence[str | None], prefix: str
) -> tuple[list[str | None], list[_Passed]]:
    """Follows inputs by name; returns the names of outputs, and what was passed to rounds."""
    passed: list[_Passed] = []

    def follow(eqn: jaxprs.JaxprEqn, *names: str | None) -> list[str | None]:
        unnamed: list[str | None] = [None] * len(eqn.outvars)
        wanted = _wanted(eqn, prefix)
        if wanted is not None:
            aval: Any = eqn.outvars[0].aval
            passed.append(_Passed(wanted, names[0], aval.shape))
            return [wanted if wanted.startswith("record ") else names[0]]
        if eqn.primitive.name == "name":
            return [names[0]]
        match jaxprs.layout(eqn):
            case jaxprs.Call(body):
                outputs, inner = _calls(body, list(names), prefix)
                passed.extend(inner)
                return outputs
            case jaxprs.Cond(branches):
                each = [_calls(b, list(names[1:]), prefix) for b in branches]
                most = max((inner for _, inner in each), key=lambda inner: len(inner))
                passed.extend(most)
                others = [one for _, inner in each if inner is not most for one in inner]
                passed.extend(one for one in others if one.received != one.wanted)
                same = zip(*(outputs for outputs, _ in each), strict=True)
                return [names[0] if len(set(names)) == 1 else None for names in same]
        for body in jaxprs.inner_jaxprs(eqn):
            # A loop, or what is not known, may call it any number of times.
            _, inner = _calls(body, [None] * len(body.jaxpr.invars), prefix)
            passed.extend(inner * 2)
        return unnamed

    outputs = jaxprs.evaluate(
        closed, inputs, follow, literal=lambda v: None, constant=lambda value: None
    )
    return outputs, passed


def _wanted(eqn: jaxprs.JaxprEqn, prefix: str) -> str | None:
    names = (value for value in eqn.params.values() if isinstance(value, str))
    return next((n.removeprefix(prefix) for n in names if n.startswith(prefix)), None)
