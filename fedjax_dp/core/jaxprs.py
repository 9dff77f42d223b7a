"""Traced functions and primitives: the one file that follows how JAX represents them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
CONTROL_FLOW = frozenset({"scan", "while", "cond"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def evaluate_equation(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """Evaluates an equation as it was traced."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.9 the functions of a call came separately from the other parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    outputs = eqn.primitive.bind(*functions, *operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def evaluate(
    closed: ClosedJaxpr,
    arguments: Iterable[Any],
    rule: Callable[..., Sequence[Any]] = evaluate_equation,
    *,
    literal: Callable[[Literal], Any] = lambda v: v.val,
) -> list[Any]:
    """Evaluates a jaxpr, every equation by `rule(eqn, *operands)`."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    return _run(jaxpr.eqns, known, jaxpr.outvars, rule, literal)


def compute(wanted: Var, eqns: Sequence[JaxprEqn], known: Mapping[Var, Any]) -> Any:
    """Evaluates the equations that lead from known variables to another, and no others."""
    needed, steps = {wanted}, []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            steps.append(eqn)
            needed.update(v for v in variables(eqn) if v not in known)
    return _run(reversed(steps), dict(known), [wanted], evaluate_equation, lambda v: v.val)[0]


def _run(
    eqns: Iterable[JaxprEqn],
    known: dict[Var, Any],
    wanted: Sequence[Any],
    rule: Callable[..., Sequence[Any]],
    literal: Callable[[Literal], Any],
) -> list[Any]:
    def read(v: Any) -> Any:
        return literal(v) if isinstance(v, Literal) else known[v]

    for eqn in eqns:
        operands = [read(v) for v in eqn.invars]
        with eqn.ctx.manager:
            known.update(zip(eqn.outvars, rule(eqn, *operands), strict=True))
    return [read(v) for v in wanted]


def variables(eqn: JaxprEqn) -> list[Var]:
    """Lists the inputs of an equation that are not literals."""
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Lists the jaxprs among the parameters of an equation."""
    values = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    found = [item for items in values for item in items if isinstance(item, ClosedJaxpr | Jaxpr)]
    return [item.jaxpr if isinstance(item, ClosedJaxpr) else item for item in found]


def has_primitive(jaxpr: Jaxpr, name: str) -> bool:
    """Checks whether a jaxpr, or one inside of it, has an equation of a primitive."""
    return any(
        eqn.primitive.name == name or any(has_primitive(body, name) for body in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns what a call, a checkpoint or a custom rule evaluates on the operands, if any."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    found = next((eqn.params[n] for n in names if n in eqn.params), None)
    if eqn.primitive.name in CONTROL_FLOW or not isinstance(found, ClosedJaxpr | Jaxpr):
        return None
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Traces a jaxpr again with its calls inlined."""

    def inline(eqn: JaxprEqn, *operands: Any) -> list[Any]:
        body = body_of(eqn) if eqn.primitive.name in CALLS else None
        return evaluate(body, operands, inline) if body else evaluate_equation(eqn, *operands)

    return jax.make_jaxpr(lambda *arguments: evaluate(closed, arguments, inline))(*closed.in_avals)


def parts_of_scan(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[ClosedJaxpr, *tuple[Any, ...]]:
    """Returns the body of a scan and its constants, carry and inputs."""
    params = eqn.params
    return params["jaxpr"], *_split(operands, params["num_consts"], params["num_carry"])


def parts_of_while(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[ClosedJaxpr, *tuple[Any, ...]]:
    """Returns condition and body of a loop, the constants of both, and the carry."""
    params = eqn.params
    parts = _split(operands, params["cond_nconsts"], params["body_nconsts"])
    return params["cond_jaxpr"], params["body_jaxpr"], *parts


def _split(values: Sequence[Any], first: int, second: int) -> tuple[list[Any], ...]:
    both = first + second
    return list(values[:first]), list(values[first:both]), list(values[both:])


def evaluate_structure(
    eqn: JaxprEqn, run: Callable[..., list[Any]], operands: Sequence[Any]
) -> list[Any]:
    """Evaluates a call, checkpoint, loop or branch, its inner jaxprs by `run(jaxpr, operands)`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        body, consts, carry, xs = parts_of_scan(eqn, operands)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run(body, [*consts, *carry, *x])
            return outputs[: len(carry)], outputs[len(carry) :]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, carry, xs, **options)
        return [*carry, *ys]
    if name == "while":
        cond, body, of_cond, of_body, carry = parts_of_while(eqn, operands)
        return lax.while_loop(
            lambda state: run(cond, [*of_cond, *state])[0],
            lambda state: run(body, [*of_body, *state]),
            carry,
        )
    if name == "cond":
        branches = [functools.partial(lambda b, *x: run(b, x), b) for b in params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    called = body_of(eqn)
    assert called is not None
    if name in CHECKPOINTS:
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *x: run(called, x), **options)(*operands)
    return run(called, operands)


def define(
    name: str,
    fn: Callable[..., jax.Array],
    *,
    abstract: Callable[..., Any],
    batch: Callable[..., tuple[jax.Array, Any]],
    transpose: Callable[..., list[Any]] | None = None,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    on_cpu: Callable[..., jax.Array] | None = None,
    eager: Callable[..., jax.Array] | None = None,
) -> Primitive:
    """Defines a primitive of one result, linear by its `transpose` or bilinear by `gradients`."""
    primitive = Primitive(name)

    @functools.partial(jax.jit, static_argnames="params")
    def compiled(*operands: jax.Array, params: tuple[tuple[str, Any], ...]) -> jax.Array:
        return fn(*operands, **dict(params))

    def run(*operands: jax.Array, **params: Any) -> jax.Array:
        return compiled(*operands, params=tuple(params.items()))

    primitive.def_impl(eager or run)
    primitive.def_abstract_eval(abstract)
    for lowering, platform in ((fn, None), *([(on_cpu, "cpu")] if on_cpu else [])):
        rule = mlir.lower_fun(lowering, multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)
    if transpose is not None:
        ad.deflinear2(primitive, transpose)
    if gradients is not None:
        ad.defbilinear(primitive, *gradients)
    batching.primitive_batchers[primitive] = batch
    return primitive
