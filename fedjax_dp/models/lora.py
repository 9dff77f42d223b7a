"""Low-rank adapters (LoRA): a frozen base, and few trained parameters added to its kernels.

The base's kernels are replaced where a traced model multiplies by them, so that any module can be
adapted, and a client's kernel is never made: all clients share the base.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax import lax

from fedjax_dp.core import checks, jaxprs, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.devices import undivided
from fedjax_dp.core.jaxprs import ClosedJaxpr, JaxprEqn
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Where
from fedjax_dp.models.lowering import dense

# The names of an adapter's two parts among the parameters.
_DOWN, _UP = "down", "up"


@checked
def lora(
    model: Model,
    params: PyTree,
    *,
    rank: Count,
    targets: Where | Mapping[str, int],
    alpha: Positive = 16.0,
    trained: Where = (),
) -> Model:
    """Freezes a model except for low-rank adapters of some kernels.

    A kernel W that inputs multiply becomes W + (α/r)·A·B, with A of r columns and B of r rows. Only
    A and B are parameters of the new model: they alone are clipped, noised, sent and stored by
    client. Training and evaluation compute x·W + (α/r)·(x·A)·B, so that no client has a kernel of
    its own, and gradients of single examples exist for A and B alone. A kernel that is used in
    another way, as by a convolution, is made where it is used.

    Args:
      model: any model; one with buffers, such as batch norm, is applied as in evaluation, by its
        frozen statistics, after which its examples are taken not to influence one another. Where
        they do all the same, as by its loss, `_replace(mixes_examples=True)` must say so of the
        result: this cannot be checked, and a wrong value voids per-example clipping. Any other
        model keeps its `mixes_examples`.
      params: the values of the base, of the structure of the model's parameters, such as
        `init(key)` or what was read from a file.
      rank: r, at least 1.
      targets: the kernels, of two axes or more, in the form of `Model.freeze`, such as
        "params/*/query/kernel" or several patterns; or the number of leading axes that inputs are
        multiplied along by pattern, without which it is 1, and all but the last of four or more.
      alpha: α, above 0.
      trained: parameters that are trained as they are, in the same form, such as the head's.

    Returns:
      The model, which starts as the base does, B being zero; its `full_params` returns the base
      with the adapters added in.

    Raises:
      ValueError: for a pattern that matches nothing, a target with fewer than two axes or that
        `trained` names too, a rank above that of a target, or values of other shapes.

    Source: Hu and others 2022 (LoRA), section 4.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    names, leaves = trees.paths(shapes), jax.tree.leaves(shapes)
    where = tuple(targets) if isinstance(targets, Mapping) else targets
    is_target = _marked("targets", shapes, where)
    is_trained = _marked("trained", shapes, trained)
    adapted = [i for i, flag in enumerate(is_target) if flag]
    for i in adapted:
        rule = "have two axes or more to have an adapter"
        checks.require(leaves[i].ndim >= 2, names[i], rule, list(leaves[i].shape))
        rule = "be a target or trained, not both"
        checks.require(not is_trained[i], names[i], rule, "both")
    held = kinds.held(shapes, [not flag for flag in is_trained], params)
    num_in = {i: _axes_in(names[i], leaves[i].ndim, targets) for i in adapted}
    for i, split in num_in.items():
        most = min(math.prod(leaves[i].shape[:split]), math.prod(leaves[i].shape[split:]))
        rule = f"be at most {most}, the rank that {names[i]} can have"
        checks.require(rank <= most, "rank", rule, rank)
    scale = alpha / rank

    def init(key: PRNGKey) -> PyTree:
        adapters: dict[str, Any] = {}
        for i in adapted:
            shape, split = leaves[i].shape, num_in[i]
            own = jax.random.fold_in(key, i)
            width = 1 / math.sqrt(math.prod(shape[:split]))
            down = width * jax.random.normal(own, (*shape[:split], rank))
            up = jnp.zeros((rank, *shape[split:]))
            dtype = leaves[i].dtype
            adapters[names[i]] = {_DOWN: down.astype(dtype), _UP: up.astype(dtype)}
        # Without one no value of the base is drawn.
        drawn = jax.tree.leaves(model.init(key)) if any(is_trained) else leaves
        whole = [x if flag else None for x, flag in zip(drawn, is_trained, strict=True)]
        return {"adapters": adapters, "trained": jax.tree.unflatten(held.structure, whole)}

    def with_adapters(own: PyTree) -> PyTree:
        own = undivided(own)
        base = jax.tree.leaves(held.within(own["trained"]))
        for i in adapted:
            pair = own["adapters"][names[i]]
            up = scale * pair[_UP]
            base[i] = LowRank(base[i], pair[_DOWN], up, num_in[i], tuple(range(leaves[i].ndim)))
        return jax.tree.unflatten(held.structure, base)

    def apply(own: PyTree, x: PyTree, *, is_training: bool = False, **rest: Any) -> Any:
        is_on = is_training and not model.buffer_keys

        def outputs(full: PyTree, x: PyTree, rest: Any) -> PyTree:
            return model.apply(full, x, is_training=is_on, **rest)[0]

        return _evaluated(outputs, with_adapters(own), x, rest), own

    def full_params(own: PyTree) -> PyTree:
        full = jax.tree.map(_dense, with_adapters(own), is_leaf=_is_low_rank)
        return model.full_params(full)

    return model._replace(
        name=f"{model.name}_lora",
        init=init,
        apply=apply,
        # As in evaluation, statistics of a batch are not read.
        mixes_examples=model.mixes_examples and not model.buffer_keys,
        buffer_keys=(),
        full_params=full_params,
        is_quadratic=False,
        frozen=(*model.frozen, held),
    )


@flax.struct.dataclass
class LowRank:
    """A kernel that is not made: base + down·up, its axes in another order.

    `down` is `[*inputs, rank]`, with `num_in` axes of inputs, and `up` `[rank, *outputs]`. `base`
    is in the current order of axes, `order` the place of each of them among inputs and outputs.
    """

    base: jax.Array
    down: jax.Array
    up: jax.Array
    num_in: int = flax.struct.field(pytree_node=False)
    order: tuple[int, ...] = flax.struct.field(pytree_node=False)


def _is_low_rank(x: Any) -> bool:
    return isinstance(x, LowRank)


def _dense(x: Any) -> Any:
    """Makes the kernel."""
    if not isinstance(x, LowRank):
        return x
    return x.base + jnp.tensordot(x.down, x.up, 1).transpose(x.order).astype(x.base.dtype)


def _evaluated(fn: Callable[..., PyTree], full: PyTree, *rest: Any) -> PyTree:
    """Evaluates a function of parameters, some of them of low rank."""
    leaves, structure = jax.tree.flatten(full, is_leaf=_is_low_rank)
    others, of_others = jax.tree.flatten(rest)
    count = len(leaves)

    def flat(*arrays: Any) -> PyTree:
        rest = jax.tree.unflatten(of_others, arrays[count:])
        return fn(jax.tree.unflatten(structure, arrays[:count]), *rest)

    kernels = [x.base if isinstance(x, LowRank) else x for x in leaves]
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*kernels, *others)
    outputs = jaxprs.evaluate(closed, [*leaves, *others], _rule)
    return jax.tree.unflatten(jax.tree.structure(shapes), [_dense(x) for x in outputs])


def _rule(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    """Evaluates an equation; products with kernels of low rank stay apart from the base."""
    if not any(map(_is_low_rank, operands)):
        return jaxprs.evaluate_equation(eqn, *operands)
    name, structure = eqn.primitive.name, jaxprs.layout(eqn)
    if isinstance(structure, jaxprs.Scan):
        # What the steps share stays of low rank; what they carry or divide does not.
        count = structure.num_consts
        given = [*operands[:count], *map(_dense, operands[count:])]
        return jaxprs.evaluate_structure(structure, _run_dense, given)
    # Derivatives of their own are for kernels that are made, and loops carry none.
    if structure and name not in jaxprs.CUSTOM_RULES and not isinstance(structure, jaxprs.While):
        return jaxprs.evaluate_structure(structure, _run, operands)
    if name in _RULES and (name == dense.NAME or jaxprs.has_parameters(eqn)):
        outputs = _RULES[name](eqn, *operands)
        if outputs is not None:
            return [outputs]
    return jaxprs.evaluate_equation(eqn, *map(_dense, operands))


def _run(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    return jaxprs.evaluate(closed, operands, _rule)


def _run_dense(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    return [_dense(x) for x in _run(closed, operands)]


def _dot(eqn: JaxprEqn, left: Any, right: Any) -> jax.Array | None:
    """Multiplies by a kernel and by its adapter; None where the axes do not allow it."""
    (of_left, of_right), batched = eqn.params["dimension_numbers"]
    if any(batched) or (_is_low_rank(left) and _is_low_rank(right)):
        return None
    options = {k: v for k, v in eqn.params.items() if k != "dimension_numbers"}

    def dot(x: Any, y: Any, x_axes: Sequence[int], y_axes: Sequence[int]) -> jax.Array:
        return lax.dot_general(x, y, ((tuple(x_axes), tuple(y_axes)), ((), ())), **options)

    is_left = _is_low_rank(left)
    kernel, x = (left, right) if is_left else (right, left)
    axes, of_x = (of_left, of_right) if is_left else (of_right, of_left)
    contracted = [kernel.order[axis] for axis in axes]
    inputs, ndim = range(kernel.num_in), len(kernel.order)
    if sorted(contracted) == list(inputs):
        first, own, second, at, left_over = kernel.down, contracted, kernel.up, 0, kernel.num_in
    elif sorted(contracted) == list(range(kernel.num_in, ndim)):
        own = [1 + place - kernel.num_in for place in contracted]
        first, second, at, left_over = kernel.up, kernel.down, kernel.num_in, 0
    else:
        return None
    # The rank comes last.
    low = dot(x, first, of_x, own)
    low = dot(low, second, [low.ndim - 1], [at])
    # The rest of the kernel's axes come last, in their own order; now in the current one.
    kept = [place - left_over for axis, place in enumerate(kernel.order) if axis not in axes]
    lead = low.ndim - len(kept)
    low = low.transpose([*range(lead), *(lead + place for place in kept)])
    if is_left:
        low = jnp.moveaxis(low, range(lead, low.ndim), range(len(kept)))
        return dot(kernel.base, x, axes, of_x) + low
    return dot(x, kernel.base, of_x, axes) + low


def _transposed(eqn: JaxprEqn, kernel: LowRank) -> LowRank:
    turned = eqn.params["permutation"]
    base, order = kernel.base.transpose(turned), tuple(kernel.order[axis] for axis in turned)
    return kernel.replace(base=base, order=order)  # type: ignore[attr-defined]


def _converted(eqn: JaxprEqn, kernel: LowRank) -> LowRank:
    dtype = eqn.params["new_dtype"]
    parts = {name: getattr(kernel, name).astype(dtype) for name in ("base", "down", "up")}
    return kernel.replace(**parts)  # type: ignore[attr-defined]


def _rows(eqn: JaxprEqn, kernel: Any, indices: Any) -> jax.Array | None:
    """Reads rows, as embeddings do: those of the base, and of the adapter's first part."""
    if not _is_low_rank(kernel) or kernel.order != (0, 1) or kernel.num_in != 1:
        return None
    params, numbers = dict(eqn.params), eqn.params["dimension_numbers"]
    width = kernel.base.shape[1]
    last = (indices.ndim - 1,)
    is_rows = params["slice_sizes"] == (1, width) and numbers.collapsed_slice_dims == (0,)
    if not is_rows or numbers.start_index_map != (0,) or numbers.offset_dims != last:
        return None
    (whole,) = jaxprs.evaluate_equation(eqn, kernel.base, indices)
    del params["slice_sizes"], params["dimension_numbers"]
    params = {name: params[name] for name in ("unique_indices", "indices_are_sorted", "mode")}
    sizes = (1, kernel.down.shape[1])
    low = lax.gather(kernel.down, indices, numbers, sizes, fill_value=0, **params)
    return whole + jnp.tensordot(low, kernel.up, 1)


_RULES: dict[str, Callable[..., Any]] = {
    "dot_general": _dot,
    # A mark for the gradient of a kernel, and no base has a gradient.
    dense.NAME: lambda eqn, kernel: kernel,
    "transpose": _transposed,
    "convert_element_type": _converted,
    "gather": _rows,
}


def _axes_in(name: str, ndim: int, targets: Where | Mapping[str, int]) -> int:
    """Finds how many leading axes of a kernel inputs are multiplied along."""
    if isinstance(targets, Mapping):
        num_axes = next(n for pattern, n in targets.items() if kinds.matches(name, pattern))
        checks.whole(f"targets of {name}", num_axes, at_least=1)
        checks.require(num_axes < ndim, f"targets of {name}", f"be below {ndim}", num_axes)
        return num_axes
    return 1 if ndim < 4 else ndim - 1


def _marked(name: str, shapes: PyTree, where: Where) -> list[bool]:
    """Marks the leaves that patterns match, each of which must match one."""
    if not callable(where):
        kinds.require_matches(name, kinds.patterns(where), trees.paths(shapes), "parameters")
    return jax.tree.leaves(kinds.marked(shapes, where))
