"""Norms and weighted sums of per-example gradients, without storing gradients if that is cheaper.

An equation of the traced loss that reads one parameter and data is a *site*. One backward pass
gives the cotangent at every site's output; with the site's data operands it determines the gradient
of every example. If that is one outer product, as in a dense layer, its norm is that of its
factors, and the weighted sum over examples is one pullback for the batch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs, sums, trees
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.core.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var
from fedjax_dp.core.materialize import materialize
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import outer_products
from fedjax_dp.models.lowering import bilinear, dense, narrow, winograd
from fedjax_dp.models.lowering.patches import Window, gather_patches, slices

_VIEWS = (
    *("reshape", "transpose", "squeeze", "expand_dims", "optimization_barrier", "copy"),
    dense.NAME,
)
_LOOPS_AND_RULES = jaxprs.CONTROL_FLOW | jaxprs.CUSTOM_RULES


class Convolution(NamedTuple):
    """A convolution of one example: no groups, no dilation, at most two spatial dimensions.

    The window moves over the input with zeros before and after each dimension, cropped if negative.
    `channels_last` permutes input, kernel and output to `[1, *spatial, features]`,
    `[*kernel, inputs, outputs]` and `[1, *positions, features]`.
    """

    window: Window
    padding: tuple[tuple[int, int], ...]
    channels_last: tuple[tuple[int, ...], ...]
    num_outputs: int

    def patches(self, x: jax.Array) -> jax.Array:
        """Gathers the inputs of every output, `[num_rows, entries · inputs]`."""
        patches = gather_patches(self._padded(x), self.window)
        return patches.reshape(-1, patches.shape[-1])

    def columns(self, cotangent: jax.Array) -> jax.Array:
        """Lists the cotangents of every output, `[num_rows, outputs]`."""
        moved = jnp.transpose(cotangent, self.channels_last[2])
        return moved.reshape(-1, moved.shape[-1])

    def matrix(self, kernel: jax.Array) -> jax.Array:
        """Writes a kernel as the matrix that multiplies patches, `[entries · inputs, outputs]`."""
        moved = jnp.transpose(kernel, self.channels_last[1])
        return moved.reshape(-1, moved.shape[-1])

    def by_rows(self, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Computes the gradient of the kernel, a row at a time, `[entries · inputs, outputs]`.

        Shifts along the last spatial dimension are features; for each row of the kernel they and
        the cotangents are matrices that lie in memory as the product reads them. Compilers for TPUs
        compute the gradients of examples apart as one convolution of as many groups, most of whose
        products are of zeros.
        """
        columns = lax.optimization_barrier(self.columns(cotangent))
        x = self._padded(x)
        window = self.window
        if len(window.kernel) == 1:
            x, window = x[:, None], Window(*((1, *sizes) for sizes in window))
        stacked = jnp.concatenate(slices(x, window, 1), axis=-1)[0]
        width, stride = stacked.shape[1], window.strides[0]
        # Rows of one remainder by the stride are one after another.
        rows = [
            lax.optimization_barrier(part.reshape(-1, part.shape[-1]))
            for part in (stacked[first::stride] for first in range(min(stride, window.kernel[0])))
        ]
        products = []
        for row in range(window.kernel[0]):
            first = row // stride * width
            shifted = lax.slice_in_dim(rows[row % stride], first, first + len(columns))
            products.append(jnp.einsum("to,ti->oi", columns, shifted))
        stacked_products = jnp.stack(products)
        return jnp.swapaxes(stacked_products, 1, 2).reshape(-1, stacked_products.shape[1])

    def _padded(self, x: jax.Array) -> jax.Array:
        return bilinear.pad(jnp.transpose(x, self.channels_last[0]), self.padding)


def convolution_of(eqn: JaxprEqn) -> Convolution | None:
    """Describes a native convolution of one example; None if it is of another kind."""
    if eqn.primitive.name != "conv_general_dilated" or not jaxprs.has_parameters(eqn):
        return None
    of, numbers = eqn.params, eqn.params["dimension_numbers"]
    num_spatial = len(of["window_strides"])
    is_plain = (
        num_spatial in (1, 2)
        and of["feature_group_count"] == of["batch_group_count"] == 1
        and max(*of["lhs_dilation"], *of["rhs_dilation"]) == 1
        and _shape(eqn.invars[0])[numbers.lhs_spec[0]] == 1
        and min(_shape(eqn.outvars[0])) > 0
    )
    if not is_plain:
        return None
    output, inputs, *spatial = numbers.rhs_spec
    kernel = tuple(_shape(eqn.invars[1])[i] for i in spatial)
    ones = (1,) * num_spatial
    padding = tuple((int(low), int(high)) for low, high in of["padding"])
    return Convolution(
        Window(kernel, tuple(of["window_strides"]), ones),
        padding,
        (
            bilinear.channels_last(numbers.lhs_spec),
            (*spatial, inputs, output),
            bilinear.channels_last(numbers.out_spec),
        ),
        _shape(eqn.invars[1])[output],
    )


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)


class PerExample(NamedTuple):
    """Losses of a batch, and the parts of their gradients that clipping needs.

    An example of weight 0 adds exactly zero to `weighted_sum`, whatever its gradient. The term of
    any other has a norm of at most weight times its entry of `norms`, in any order, up to 1e-3 of
    the largest such product (by the page on proofs, "Clipping in floating point").
    """

    losses: jax.Array  # [examples]
    # Bounds on the L2 norm at each leaf, each `[examples]`, float32: the norm itself to 1e-3, for
    # gradients beyond 1e-15; not finite if the gradient or its square is not.
    norms: PyTree
    # Of weights, which have the structure of `norms`: the sum over examples of weight times
    # gradient.
    weighted_sum: Callable[[PyTree], PyTree]


class _Site(NamedTuple):
    """An equation that reads parameter `leaf` at operand `position`, and data elsewhere."""

    equation: int
    leaf: int
    position: int


class _Product(NamedTuple):
    """A site that multiplies rows of data by a matrix with each parameter entry once."""

    rows_of: Callable[..., jax.Array]  # Of the data: [num_rows, inputs].
    columns_of: Callable[[jax.Array], jax.Array]  # Of the cotangent: [num_rows, outputs].
    matrix_of: Callable[[jax.Array], jax.Array]  # Of the parameter: [inputs, outputs].
    num_rows: int
    inputs: int
    outputs: int
    # The convolution that the site is, if it is a native one.
    convolution: Convolution | None = None


class _Plan(NamedTuple):
    """A traced loss taken apart: its equations, those fed by parameters alone, its sites."""

    closed: ClosedJaxpr
    owner: dict[Var, int]
    sites: tuple[_Site, ...]
    direct: tuple[int, ...]


def per_example(
    loss_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, examples: PyTree
) -> PerExample:
    """Computes losses, gradient norms and a weighted gradient sum of a batch, for any loss.

    A parameter that is read once, by an equation that also reads data, is handled at that site; one
    that is read several times, or inside a loop, is differentiated for each example.

    Source: norms of rank-one gradients from Goodfellow 2015; reuse of the backward pass from Bu and
    others 2023 (book-keeping).
    """
    leaves, structure = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), examples)
    plan = _plan(lambda flat, x: loss_fn(jax.tree.unflatten(structure, flat), x), leaves, one)
    frozen = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    shapes: list[Any] = [plan.closed.jaxpr.eqns[s.equation].outvars[0].aval for s in plan.sites]
    taps = [jnp.zeros(s.shape, s.dtype) for s in shapes]

    def tapped(taps, direct, example):
        return _evaluate(plan, frozen, dict(zip(plan.direct, direct, strict=True)), taps, example)

    def one_example(example):
        direct = [leaves[i] for i in plan.direct]
        differentiate = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (loss, operands), (cotangents, gradients) = differentiate(taps, direct, example)
        return loss, operands, cotangents, gradients

    losses, operands, cotangents, gradients = jax.vmap(one_example)(examples)
    num_examples = losses.shape[0]
    norms: list[Any] = [jnp.zeros(num_examples, jnp.float32)] * len(leaves)
    totals: list[Any] = [lambda w, leaf=leaf: jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves]
    for i, gradient in zip(plan.direct, gradients, strict=True):
        norms[i], totals[i] = _formed(gradient)
    for site, data, cotangent in zip(plan.sites, operands, cotangents, strict=True):
        norms[site.leaf], totals[site.leaf] = _at_site(
            plan, site, leaves[site.leaf], data, cotangent
        )

    def weighted_sum(weights):
        pairs = zip(totals, jax.tree.leaves(weights), strict=True)
        return jax.tree.unflatten(structure, [fn(w) for fn, w in pairs])

    return PerExample(losses, jax.tree.unflatten(structure, norms), weighted_sum)


def _weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Multiplies rows by weights; rows of weight 0 become exactly 0, even if not finite."""
    shaped = weights.reshape(-1, *[1] * (values.ndim - 1))
    wide = trees.at_least_float32(values)
    return jnp.where(shaped != 0, shaped * wide, 0).astype(wide.dtype)


def _formed(
    gradients: jax.Array, shaped: Callable[[jax.Array], jax.Array] = lambda total: total
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Computes norms and weighted sums of gradients that are formed one by one."""
    # Computed once: recomputed for the sum, they could be rounded differently.
    gradients = materialize(gradients)
    norms = jax.vmap(trees.l2_norm)(gradients) + outer_products.unseen(gradients[0].size)

    def summed(weights):
        return shaped(sums.value(sums.over_first_axis(_weigh(weights, gradients))))

    return norms, summed


def _plan(fn: Callable[..., Any], leaves: list[jax.Array], example: Any) -> _Plan:
    """Traces a loss flat and finds where each parameter meets data."""
    flat = jaxprs.inlined(jax.make_jaxpr(fn)(leaves, example))
    # Before they are batched, when a rule of the user's has replaced them.
    jaxprs.require_apart(flat)
    owner: dict[Var, int] = {v: i for i, v in enumerate(flat.jaxpr.invars[: len(leaves)])}
    sites: list[_Site] = []
    direct: set[int] = set()
    for index, eqn in enumerate(flat.jaxpr.eqns):
        read = jaxprs.variables(eqn)
        owned = [v for v in read if v in owner]
        made: list[Any] = [v.aval for v in eqn.outvars]
        if not owned or not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in made):
            continue
        if len(owned) == len(read) and len({owner[v] for v in owned}) == 1:
            owner.update(dict.fromkeys(eqn.outvars, owner[owned[0]]))
        elif len(owned) == 1 and _may_be_site(eqn):
            sites.append(_Site(index, owner[owned[0]], eqn.invars.index(owned[0])))
        else:
            direct.update(owner[v] for v in owned)
    direct.update(owner[v] for v in flat.jaxpr.outvars if v in owner)
    counts = [site.leaf for site in sites]
    direct.update(leaf for leaf in counts if counts.count(leaf) > 1)
    kept = tuple(site for site in sites if site.leaf not in direct)
    return _Plan(flat, owner, kept, tuple(sorted(direct)))


def _may_be_site(eqn: JaxprEqn) -> bool:
    return len(eqn.outvars) == 1 and eqn.primitive.name not in _LOOPS_AND_RULES


def _evaluate(
    plan: _Plan,
    frozen: list[jax.Array],
    direct: dict[int, jax.Array],
    taps: list[jax.Array],
    example: Any,
) -> tuple[jax.Array, list[list[Any]]]:
    """Evaluates the loss with a tap added after every site; returns what each site read."""
    arguments = [direct.get(i, leaf) for i, leaf in enumerate(frozen)]
    eqns = plan.closed.jaxpr.eqns
    tap_of = {id(eqns[s.equation]): tap for s, tap in zip(plan.sites, taps, strict=True)}
    recorded = []

    def tapped(eqn: JaxprEqn, *operands: Any) -> list[Any]:
        outputs = jaxprs.evaluate_equation(eqn, *operands)
        if id(eqn) not in tap_of:
            return outputs
        pairs = zip(operands, eqn.invars, strict=True)
        recorded.append([x for x, v in pairs if not isinstance(v, Literal) and v not in plan.owner])
        return [outputs[0] + tap_of[id(eqn)]]

    inputs = [*arguments, *jax.tree.leaves(example)]
    return jaxprs.evaluate(plan.closed, inputs, tapped)[0], recorded


def _view_of(plan: _Plan, site: _Site, leaf: jax.Array) -> jax.Array:
    """Evaluates what depends only on this parameter, up to the operand of its site."""
    jaxpr = plan.closed.jaxpr
    wanted: Any = jaxpr.eqns[site.equation].invars[site.position]
    return jaxprs.compute(wanted, jaxpr.eqns[: site.equation], {jaxpr.invars[site.leaf]: leaf})


def _at_site(
    plan: _Plan, site: _Site, leaf: jax.Array, data: list[jax.Array], cotangents: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Chooses how norms and weighted sums are computed at a site."""
    eqn = plan.closed.jaxpr.eqns[site.equation]

    def read(leaf, data):
        supply = iter(data)
        operands = [
            v.val
            if isinstance(v, Literal)
            else _view_of(plan, site, leaf)
            if i == site.position
            else next(supply)
            for i, v in enumerate(eqn.invars)
        ]
        return jaxprs.evaluate_equation(eqn, *operands)[0]

    def pulled(leaf, data, cotangent):
        return jax.vjp(lambda p: read(p, data), leaf)[1](cotangent)[0]

    product = _product_form(plan, site, eqn)
    # Products of rows and the norms of few rows need float32 or better.
    is_wide = all(jnp.finfo(x.dtype).bits >= 32 for x in (leaf, cotangents))
    if product is None or not is_wide:
        return _formed(jax.vmap(pulled, in_axes=(None, 0, 0))(leaf, data, cotangents))

    def parameter_of(total):
        return jax.linear_transpose(product.matrix_of, leaf)(total.astype(leaf.dtype))[0]

    is_formed = outer_products.is_formed(product.num_rows, product.inputs, product.outputs)
    if is_formed and product.convolution is not None:
        if choices(facts()).kernel_gradients == "native":
            return _formed(jax.vmap(pulled, in_axes=(None, 0, 0))(leaf, data, cotangents))
        by_rows = product.convolution.by_rows
        return _formed(jax.vmap(by_rows)(data[0], cotangents), parameter_of)
    rows = jax.vmap(product.rows_of)(*data)
    outputs = jax.vmap(product.columns_of)(cotangents)
    if is_formed:
        is_transposed = product.outputs < product.inputs
        matrices = outer_products.matrices(rows, outputs)
        return _formed(matrices, lambda total: parameter_of(total.T if is_transposed else total))
    factors = outer_products.factors(rows, outputs)

    def summed(weights):
        scaled = jnp.where(weights != 0, weights * factors.scale, 0)
        return parameter_of(outer_products.total(factors.rows, _weigh(scaled, factors.columns)))

    return factors.norms, summed


def _product_form(plan: _Plan, site: _Site, eqn: JaxprEqn) -> _Product | None:
    """Recognises a site that multiplies rows of data by a matrix view of its parameter."""
    operand = eqn.invars[site.position]
    if not _is_view(plan, operand, site):
        return None

    def view(leaf: jax.Array) -> jax.Array:
        return _view_of(plan, site, leaf)

    if eqn.primitive.name == "dot_general":
        return _product_of_dot(eqn, operand, lambda x: x, view)
    native = convolution_of(eqn) if site.position == 1 else None
    if native is not None:
        outputs = native.num_outputs
        return _Product(
            native.patches,
            native.columns,
            lambda leaf: native.matrix(view(leaf)),
            math.prod(_shape(eqn.outvars[0])) // outputs,
            math.prod(_shape(operand)) // outputs,
            outputs,
            native,
        )
    if eqn.primitive.name in (narrow.NAME, winograd.NAME):
        if eqn.params.get("is_adjoint"):
            # The transpose of a convolution multiplies its kernel in a different order.
            return None
        kernel, padding = _shape(operand)[:-2], eqn.params["padding"]
        return _product_of_convolution(
            eqn, site, view, lambda x: bilinear.patches_of(x, kernel, padding)
        )
    if eqn.primitive.name in jaxprs.CHECKPOINTS:
        return _product_of_patches(eqn, site, view)
    return None


def _product_of_convolution(
    eqn: JaxprEqn,
    site: _Site,
    view: Callable[[jax.Array], jax.Array],
    patches_of: Callable[[jax.Array], jax.Array],
) -> _Product | None:
    if site.position != 1:
        return None
    *positions, outputs = _shape(eqn.outvars[0])
    inputs, num_rows = math.prod(_shape(eqn.invars[1])[:-1]), math.prod(positions)
    return _Product(
        lambda x: patches_of(x).reshape(num_rows, inputs),
        lambda cotangent: cotangent.reshape(num_rows, outputs),
        lambda leaf: view(leaf).reshape(inputs, outputs),
        num_rows,
        inputs,
        outputs,
    )


def _product_of_patches(
    eqn: JaxprEqn, site: _Site, view: Callable[[jax.Array], jax.Array]
) -> _Product | None:
    structure = jaxprs.layout(eqn)
    if not isinstance(structure, jaxprs.Call) or structure.body.consts:
        return None
    inner = structure.body.jaxpr
    parameter = inner.invars[site.position]
    views = {parameter}
    for index, step in enumerate(inner.eqns):
        if views.isdisjoint(jaxprs.variables(step)):
            continue
        if step.primitive.name in _VIEWS:
            views.update(step.outvars)
            continue
        following = inner.eqns[index + 1 :]
        if step.primitive.name != "dot_general" or any(
            later.primitive.name != "reshape" for later in following
        ):
            return None
        weights = next(v for v in step.invars if v in views)
        other = next(v for v in step.invars if v not in views)
        held = [v for v in inner.invars if v is not parameter]

        def reading(inputs, wanted, steps=inner.eqns[:index]):
            def read(*values: jax.Array) -> jax.Array:
                return jaxprs.compute(wanted, steps, dict(zip(inputs, values, strict=True)))

            return read

        def matrix_of(leaf: jax.Array, read=reading([parameter], weights)) -> jax.Array:
            return read(view(leaf))

        return _product_of_dot(step, weights, reading(held, other), matrix_of)
    return None


def _product_of_dot(
    eqn: JaxprEqn,
    weights: Any,
    operand: Callable[..., jax.Array],
    matrix_of: Callable[[jax.Array], jax.Array],
) -> _Product | None:
    if not jaxprs.has_parameters(eqn):
        return None
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    x, w = eqn.invars
    x_shape, w_shape = _shape(x), _shape(w)
    is_plain = w is weights and len(w_shape) == 2 and not left_batch and not right_batch
    if not is_plain or tuple(left) != (len(x_shape) - 1,) or len(right) != 1:
        return None
    inputs, outputs = w_shape[right[0]], w_shape[1 - right[0]]
    num_rows = math.prod(x_shape[:-1])
    return _Product(
        lambda *data: operand(*data).reshape(num_rows, inputs),
        lambda cotangent: cotangent.reshape(num_rows, outputs),
        lambda leaf: matrix_of(leaf).T if right[0] == 1 else matrix_of(leaf),
        num_rows,
        inputs,
        outputs,
    )


def _is_view(plan: _Plan, v: Any, site: _Site) -> bool:
    """Checks whether an operand holds the entries of its parameter, each once."""
    made_by = {out: eqn for eqn in plan.closed.jaxpr.eqns[: site.equation] for out in eqn.outvars}
    while v in made_by:
        if made_by[v].primitive.name not in _VIEWS:
            return False
        v = made_by[v].invars[0]
    return True
