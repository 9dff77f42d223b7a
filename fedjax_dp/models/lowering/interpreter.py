"""Traces a function and evaluates it again with windowed primitives replaced."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.models import equations
from fedjax_dp.models.lowering import convolution, pooling

Replacement = Callable[..., Any]

_REPLACEMENTS: dict[str, Replacement] = {
    "conv_general_dilated": convolution.conv_general_dilated,
    "reduce_window_max": pooling.reduce_window_max,
    "reduce_window_min": pooling.reduce_window_min,
    "reduce_window_sum": pooling.reduce_window_sum,
    "select_and_gather_add": pooling.select_and_gather_add,
    "select_and_scatter_add": pooling.select_and_scatter_add,
}


@checked
def lower(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Rewrites a function so that no convolution or window reduction is left in it.

    Convolutions become patches and one GEMM, pools become slices and elementwise maxima or sums,
    and so do their derivatives, which is many times faster on a CPU wherever weights differ per
    client or the work sits in a loop body. Everything else is evaluated as it was traced.

    Args:
      fn: a pure function of pytrees. Arrays among the arguments are traced; all other leaves
        (Python numbers, strings, callables) reach `fn` as they are.

    Returns:
      A function of the same signature and values, to be differentiated, batched, scanned and
      compiled like any other. Rewrite before differentiating: derivatives of the result are free
      of the replaced primitives too, whereas those inside `fn` are only replaced one by one.
    """

    @functools.wraps(fn)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

        def flat(*arrays: jax.Array) -> Any:
            merged = list(leaves)
            for i, array in zip(traced, arrays, strict=True):
                merged[i] = array
            args, kwargs = jax.tree.unflatten(treedef, merged)
            return fn(*args, **kwargs)

        arrays = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        outputs = _evaluate(closed.jaxpr, closed.consts, *arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return lowered


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a jaxpr, handing every equation that has a rule to that rule."""
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        rule = _rule(eqn)
        with eqn.ctx.manager:
            outputs = equations.evaluate(eqn, *operands) if rule is None else rule(eqn, *operands)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
    """Finds how to evaluate an equation that holds something to replace; None keeps it."""
    name = eqn.primitive.name
    if name in _REPLACEMENTS:
        return _replace
    if name in _STRUCTURAL_RULES and any(map(_needs_rewrite, _inner_jaxprs(eqn))):
        return _STRUCTURAL_RULES[name]
    if name in _DERIVATIVE_RULES and _custom_needs_rewrite(eqn):
        return _DERIVATIVE_RULES[name]
    return None


def _inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Lists the jaxprs that an equation holds among its parameters."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _needs_rewrite(jaxpr: Jaxpr) -> bool:
    descends = _STRUCTURAL_RULES.keys() | _DERIVATIVE_RULES.keys()
    return any(
        eqn.primitive.name in _REPLACEMENTS
        or (eqn.primitive.name in descends and any(map(_needs_rewrite, _inner_jaxprs(eqn))))
        for eqn in jaxpr.eqns
    )


def _custom_needs_rewrite(eqn: JaxprEqn) -> bool:
    """Looks into a custom function and into its derivative, which may convolve on its own."""
    if any(map(_needs_rewrite, _inner_jaxprs(eqn))):
        return True
    operands, results = _shapes(eqn.invars), _shapes(eqn.outvars)
    fn = functools.partial(equations.evaluate, eqn)
    if eqn.primitive.name == "custom_jvp_call":
        derivative = jax.make_jaxpr(lambda xs: _pushforward(fn, xs, xs))(operands)
    else:
        derivative = jax.make_jaxpr(lambda xs, cts: _pullback(fn, xs)[1](cts))(operands, results)
    return _needs_rewrite(derivative.jaxpr)


def _shapes(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


def _replace(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    return [_REPLACEMENTS[eqn.primitive.name](*operands, **eqn.params)]


def _closed(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    return functools.partial(_evaluate, jaxpr.jaxpr, jaxpr.consts)


def _inline(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    if isinstance(inner, ClosedJaxpr):
        return _closed(inner)(*operands)
    return _evaluate(inner, (), *operands)


def _remat(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    params = eqn.params
    body = functools.partial(_evaluate, params["jaxpr"], ())
    checkpointed = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return checkpointed(*operands)


def _scan(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    params = eqn.params
    body = _closed(params["jaxpr"])
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = _split(operands, num_consts, num_carry)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = body(*consts, *carry, *x)
        return outputs[:num_carry], outputs[num_carry:]

    carry, ys = lax.scan(
        step,
        carry,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    params = eqn.params
    cond, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    cond_consts, body_consts, carry = _split(
        operands, params["cond_nconsts"], params["body_nconsts"]
    )
    return lax.while_loop(
        lambda state: cond(*cond_consts, *state)[0],
        lambda state: body(*body_consts, *state),
        carry,
    )


def _cond(eqn: JaxprEqn, index: Any, *operands: Any) -> list[Any]:
    return lax.switch(index, [_closed(branch) for branch in eqn.params["branches"]], *operands)


def _split(values: Sequence[Any], *sizes: int) -> list[list[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(values[start : start + size]))
        start += size
    return [*parts, list(values[start:])]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _fix_exact(fn: Callable[..., list[Any]], operands: Sequence[Any]) -> Callable[..., list[Any]]:
    """Turns a function of all operands into one of the differentiable operands alone."""

    def of_inexact(*inexact: Any) -> list[Any]:
        supply = iter(inexact)
        return fn(*(next(supply) if _is_inexact(x) else x for x in operands))

    return of_inexact


def _pushforward(
    fn: Callable[..., list[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluates a function and its derivative along tangents of the differentiable operands."""
    pairs = [(x, t) for x, t in zip(primals, tangents, strict=True) if _is_inexact(x)]
    return jax.jvp(_fix_exact(fn, primals), tuple(x for x, _ in pairs), tuple(t for _, t in pairs))


def _pullback(fn: Callable[..., list[Any]], operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Evaluates a function and prepares the pullback to its differentiable operands."""
    return jax.vjp(_fix_exact(fn, operands), *(x for x in operands if _is_inexact(x)))


def _custom_jvp(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    original = functools.partial(equations.evaluate, eqn)

    @jax.custom_jvp
    def call(*xs: Any) -> list[Any]:
        return _closed(eqn.params["call_jaxpr"])(*xs)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        exact = [not _is_inexact(x) for x in primals]
        used = [0.0 if e else t for e, t in zip(exact, tangents, strict=True)]
        return lower(functools.partial(_pushforward, original))(primals, used)

    return call(*operands)


def _custom_vjp(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    original = functools.partial(equations.evaluate, eqn)

    @jax.custom_vjp
    def call(*xs: Any) -> list[Any]:
        return _closed(eqn.params["call_jaxpr"])(*xs)

    def forward(*xs: Any) -> tuple[list[Any], Any]:
        return lower(lambda *ys: _pullback(original, ys))(*xs)

    def backward(pullback: Any, cotangents: Any) -> tuple[Any, ...]:
        gradients = iter(lower(lambda back, cts: back(cts))(pullback, cotangents))
        return tuple(next(gradients) if _is_inexact(x) else None for x in operands)

    call.defvjp(forward, backward)
    return call(*operands)


_STRUCTURAL_RULES: dict[str, Callable[..., list[Any]]] = {
    "jit": _inline,
    "closed_call": _inline,
    "core_call": _inline,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}

_DERIVATIVE_RULES: dict[str, Callable[..., list[Any]]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
