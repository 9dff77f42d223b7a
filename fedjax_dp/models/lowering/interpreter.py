"""Traces a function and evaluates it again with convolutions, pools and products replaced."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import jaxprs
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.jaxprs import ClosedJaxpr, JaxprEqn
from fedjax_dp.core.products import arithmetic
from fedjax_dp.models.lowering import convolution, dense, kernels, pooling

Replacement = Callable[..., Any]
_ARRAYS = (jax.Array, np.ndarray, np.generic)

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
    client or the work sits in a loop body. On a CPU, gradients of dense layers with few outputs are
    computed transposed. Everything else is evaluated as it was traced. Where a round computes
    convolutions by kernels of our own, these alone replace something.

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
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def flat(*arrays: jax.Array) -> Any:
            merged = list(leaves)
            for i, array in zip(traced, arrays, strict=True):
                merged[i] = array
            args, kwargs = jax.tree.unflatten(treedef, merged)
            return fn(*args, **kwargs)

        arrays = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        outputs = jaxprs.evaluate(closed, arrays, _lower_equation)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return lowered


def _lower_equation(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    """Evaluates an equation, or the parts inside it, with replacements."""
    replacement = _replacement(eqn)
    if replacement is not None:
        return [replacement(*operands, **eqn.params)]
    if dense.is_narrow(eqn):
        return dense.multiply(eqn, *operands)
    name, structure = eqn.primitive.name, jaxprs.layout(eqn)
    if isinstance(structure, jaxprs.Call) and name in _DERIVATIVE_RULES:
        if _custom_needs_rewrite(eqn):
            return _DERIVATIVE_RULES[name](eqn, structure.body, *operands)
    elif structure is not None and any(map(_needs_rewrite, jaxprs.inner_jaxprs(eqn))):
        return jaxprs.evaluate_structure(structure, _run, operands)
    return jaxprs.evaluate_equation(eqn, *operands)


def _run(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    return jaxprs.evaluate(closed, operands, _lower_equation)


def _needs_rewrite(closed: ClosedJaxpr) -> bool:
    return any(
        _replacement(eqn)
        or dense.is_narrow(eqn)
        or (jaxprs.layout(eqn) and any(map(_needs_rewrite, jaxprs.inner_jaxprs(eqn))))
        for eqn in closed.jaxpr.eqns
    )


def _replacement(eqn: JaxprEqn) -> Replacement | None:
    """Finds what an equation is replaced by."""
    if arithmetic().convolutions == "kernel":
        return kernels.conv_general_dilated if kernels.is_possible(eqn) else None
    return _REPLACEMENTS.get(eqn.primitive.name) if jaxprs.has_parameters(eqn) else None


def _custom_needs_rewrite(eqn: JaxprEqn) -> bool:
    """Whether a custom function, or its derivative alone, contains something to rewrite."""
    if any(map(_needs_rewrite, jaxprs.inner_jaxprs(eqn))):
        return True
    operands, results = _shapes(eqn.invars), _shapes(eqn.outvars)
    fn = functools.partial(jaxprs.evaluate_equation, eqn)
    if eqn.primitive.name == "custom_jvp_call":
        derivative = jax.make_jaxpr(lambda xs: _pushforward(fn, xs, xs))(operands)
    else:
        derivative = jax.make_jaxpr(lambda xs, cts: _pullback(fn, xs)[1](cts))(operands, results)
    return _needs_rewrite(derivative)


def _shapes(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


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


def _custom_jvp(eqn: JaxprEqn, body: ClosedJaxpr, *operands: Any) -> list[Any]:
    original = functools.partial(jaxprs.evaluate_equation, eqn)

    @jax.custom_jvp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        exact = [not _is_inexact(x) for x in primals]
        used = [0.0 if e else t for e, t in zip(exact, tangents, strict=True)]
        return lower(functools.partial(_pushforward, original))(primals, used)

    return call(*operands)


def _custom_vjp(eqn: JaxprEqn, body: ClosedJaxpr, *operands: Any) -> list[Any]:
    original = functools.partial(jaxprs.evaluate_equation, eqn)

    @jax.custom_vjp
    def call(*xs: Any) -> list[Any]:
        return _run(body, xs)

    def forward(*xs: Any) -> tuple[list[Any], Any]:
        return lower(lambda *ys: _pullback(original, ys))(*xs)

    def backward(pullback: Any, cotangents: Any) -> tuple[Any, ...]:
        gradients = iter(lower(lambda back, cts: back(cts))(pullback, cotangents))
        return tuple(next(gradients) if _is_inexact(x) else None for x in operands)

    call.defvjp(forward, backward)
    return call(*operands)


_DERIVATIVE_RULES = {"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp}
