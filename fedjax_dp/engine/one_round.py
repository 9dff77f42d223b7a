"""What the step of a wrapper does beside the one round that is paid for, found by tracing it."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.algorithms.values import Hyper
from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Cohort
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import priced
from fedjax_dp.engine.round import ByClient, SimulationState

_PASSED = "fedjax_dp: passed to a round: "
_STEP = "the step of a wrapper, where privacy is claimed,"
Step = Callable[..., Any]


# While a wrapper is traced: whether cohorts are secret.
_ARE_SECRET: ContextVar[bool | None] = ContextVar("are_secret", default=None)


@contextlib.contextmanager
def _watching(are_secret: bool | None) -> Iterator[None]:
    token = _ARE_SECRET.set(are_secret)
    try:
        yield
    finally:
        _ARE_SECRET.reset(token)


def watched(run: Step) -> Step:
    """Makes the step of a round one that is seen where a wrapper of it is traced."""

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        are_secret = _ARE_SECRET.get()
        if are_secret is None:
            return run(state, hyper, examples, cohort, key, layout)
        for name, leaf in _paid_for(state, hyper, cohort, key, are_secret=are_secret):
            checkpoint_name(jnp.asarray(leaf), f"{_PASSED}{name}")
        inputs = (state, hyper, examples, cohort, key)
        with _watching(None):
            _, *reported = jax.eval_shape(lambda *x: run(*x, layout), *inputs)
        record, info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), reported)
        # Metrics are exact. Who was drawn is a secret that amplification needs.
        record = jax.tree.map(mark, record) if are_secret else record
        return state._replace(round=state.round + 1), record, jax.tree.map(mark, info)

    return step


def of_one_round(run: Step, are_cohorts_secret: Callable[[], bool]) -> Step:
    """Makes a step that is refused if it costs more than the round that a ledger charges for it.

    Guarantee: it calls the round at most once, with what is paid for (key, number of the round,
    cohort and priced numbers) as it was received. Nothing of the state that the server or the
    wrapper keeps is computed from examples, client states or metrics, nor from the cohort where
    cohorts are secret. What a callback to the host does is not seen.
    """

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        inputs = (state, hyper, examples, cohort, key)
        are_secret = are_cohorts_secret()
        with _watching(are_secret):
            closed, after = jax.make_jaxpr(lambda *x: run(*x, layout)[0], return_shape=True)(
                *inputs
            )
        _require_one_call(closed, inputs, are_secret=are_secret)
        _require_released_only(closed, inputs, after, are_secret=are_secret)
        return run(*inputs, layout)

    return step


def _require_released_only(
    closed: jaxprs.ClosedJaxpr, inputs: tuple[Any, ...], after: Any, *, are_secret: bool
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
    found = marks_reaching(closed, jax.tree.leaves(marked))
    are_own = jax.tree.leaves(_unpublished(after))
    is_leak = any(x and not is_own for x, is_own in zip(found.outputs, are_own, strict=True))
    sources = "examples, client states or metrics" + (", or from the cohort" * are_secret)
    rule = f"compute nothing of the server's state or of its own from {sources}"
    unknown = f"one with {', '.join(found.unknown)}, through which this cannot be followed"
    checks.require(not is_leak, _STEP, rule, unknown if found.unknown else "one that does")


def _unpublished(state: Any) -> Any:
    """Says of each array of a state whether it is of clients, which keep it to themselves."""

    def of(part: PyTree, *, is_own: bool) -> PyTree:
        return jax.tree.map(lambda _: is_own, part)

    outer = jax.tree.map(
        lambda part: of(part, is_own=isinstance(part, ByClient)),
        state.outer,
        is_leaf=lambda part: isinstance(part, ByClient),
    )
    return of(state, is_own=False)._replace(clients=of(state.clients, is_own=True), outer=outer)


def _paid_for(
    state: SimulationState, hyper: Hyper, cohort: Cohort, key: PRNGKey, *, are_secret: bool
) -> Iterator[tuple[str, Any]]:
    """Lists, by name, what a round must receive as the federation received it.

    Where cohorts are secret, a fate that depends on other clients would show who they are.
    """
    parts: dict[str, Any] = {
        "the key": key,
        "the number of the round": state.round,
        "the cohort": cohort if are_secret else cohort._asdict() | {"fate": None},
        "hyper": priced(hyper),
    }
    for name, part in parts.items():
        for path, leaf in jax.tree.leaves_with_path(part):
            yield f"{name}{jax.tree_util.keystr(path)}", leaf


class _Passed(NamedTuple):
    """An array that a round received: what it should be, what it is, and its shape."""

    wanted: str
    is_received: bool
    shape: tuple[int, ...]


def _require_one_call(
    closed: jaxprs.ClosedJaxpr, inputs: tuple[Any, ...], *, are_secret: bool
) -> None:
    leaves, structure = jax.tree.flatten(inputs)
    places = range(len(leaves))
    state, hyper, _, cohort, key = jax.tree.unflatten(structure, places)
    paid_for = _paid_for(state, hyper, cohort, key, are_secret=are_secret)
    named = {place: name for name, place in paid_for}
    _, passed = _calls(closed, [named.get(place) for place in places])
    shapes = {name: jnp.shape(leaves[place]) for place, name in named.items()}
    num_calls = sum(one.wanted == "the key" for one in passed)
    rule = "call the step that it wraps at most once a round, in no loop and not under vmap"
    is_once = num_calls <= 1 and all(one.shape == shapes[one.wanted] for one in passed)
    checks.require(is_once, _STEP, rule, "more")
    changed = [one.wanted for one in passed if not one.is_received]
    rule = "pass on what the round costs as it received it"
    checks.require(not changed, _STEP, rule, f"another {', '.join(changed)}")


def _calls(
    closed: jaxprs.ClosedJaxpr, inputs: list[str | None]
) -> tuple[list[str | None], list[_Passed]]:
    """Follows inputs by name; returns the names of outputs, and what was passed to rounds."""
    passed: list[_Passed] = []

    def follow(eqn: jaxprs.JaxprEqn, *names: str | None) -> list[str | None]:
        unnamed: list[str | None] = [None] * len(eqn.outvars)
        wanted = _wanted(eqn)
        if wanted is not None:
            aval: Any = eqn.outvars[0].aval
            passed.append(_Passed(wanted, names[0] == wanted, aval.shape))
            return [names[0]]
        match jaxprs.layout(eqn):
            case jaxprs.Call(body):
                outputs, inner = _calls(body, list(names))
                passed.extend(inner)
                return outputs
            case jaxprs.Cond(branches):
                taken: list[list[_Passed]] = [_calls(b, list(names[1:]))[1] for b in branches]
                most = max(taken, key=len)
                passed.extend(most)
                others = [one for some in taken if some is not most for one in some]
                passed.extend(one for one in others if not one.is_received)
                return unnamed
        for body in jaxprs.inner_jaxprs(eqn):
            # A loop, or what is not known, may call it any number of times.
            _, inner = _calls(body, [None] * len(body.jaxpr.invars))
            passed.extend(inner * 2)
        return unnamed

    outputs = jaxprs.evaluate(
        closed, inputs, follow, literal=lambda v: None, constant=lambda value: None
    )
    return outputs, passed


def _wanted(eqn: jaxprs.JaxprEqn) -> str | None:
    names = (value for value in eqn.params.values() if isinstance(value, str))
    return next((n.removeprefix(_PASSED) for n in names if n.startswith(_PASSED)), None)
