"""Augmentation of records while clients train: random changes of one record at a time.

A transform is a pure function `(example, key) -> example` that keeps names, shapes and types. It
sees one record alone, so that nothing of a record reaches the gradient of another.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le
from chex import PRNGKey

from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Count, Fraction, Probability
from fedjax_dp.core.registry import Registry, options_of
from fedjax_dp.core.trees import PyTree

# `(example, key) -> example` of the same names, shapes and types, one record alone.
Transform: TypeAlias = Callable[[Any, PRNGKey], Any]
# What is beyond the border of an image: a constant, its last pixel, or the image mirrored, without
# that pixel or with it.
Mode = Literal["constant", "edge", "reflect", "symmetric"]
Angle = Annotated[float, Gt(0), Le(180)]

# Weights of red, green and blue in grey (ITU-R BT.601).
_GREY = (0.299, 0.587, 0.114)


class Augmentation(NamedTuple):
    """Random changes of records, anew in every step, of which a batch holds some copies each.

    Attributes:
      transform: makes one copy of a record, `(example, key) -> example`.
      num_copies: copies of each record in a step. Their mean gradient is that of the record, and
        is clipped once under record-level privacy.
    """

    transform: Transform
    num_copies: int = 1

    def copies(self, batch: PyTree, rows: jax.Array, key: PRNGKey) -> PyTree:
        """Makes the copies of all records of a batch.

        Args:
          batch: arrays `[examples, ...]`.
          rows: what identifies each record among those of its client, `[examples]`, integers.
          key: the client's key of a step.

        Returns:
          Arrays `[examples, copies, ...]`. A copy depends on its record, the key, the row and its
          own index alone.
        """

        def of_record(example, row):
            keys = jax.vmap(lambda copy: fold(key, row, copy))(jnp.arange(self.num_copies))
            return jax.vmap(lambda own: self.transform(example, own))(keys)

        return jax.vmap(of_record)(batch, rows)

    def check(self, example: PyTree) -> None:
        """Refuses records that a transform does not fit, before any work.

        Args:
          example: shapes and types of one record, as `data.example_structure` gives them.

        Raises:
          ValueError: naming the transform, the rule and the shape.
        """
        jax.eval_shape(self.transform, example, jax.random.key(0))


@checked
def compose(*transforms: Transform, num_copies: Count = 1) -> Augmentation:
    """Applies transforms one after another, each with its own key.

    Guarantee: one record alone enters its copies, whose mean gradient is clipped once: what a
    record contributes to a step has the same bound as without augmentation. This holds for
    functions of your own too, unless they contain other records.

    Args:
      *transforms: those of this module, or your own `(example, key) -> example`, which keep names,
        shapes and types; at least one.
      num_copies: copies of each record in a step, at least 1.

    Returns:
      The augmentation, for `local_trainer`.

    Raises:
      ValueError: without transforms; when training is traced, if one changes a shape.

    Source: De and others 2022, section 3.2 (augmentation multiplicity).
    """
    rule = "hold at least one function, of which each makes a copy of a record"
    checks.require(bool(transforms), "transforms", rule, transforms)

    def transform(example, key):
        for place, one in enumerate(transforms):
            name = getattr(one, "__name__", type(one).__name__)
            example = transformed(name, one, example, jax.random.fold_in(key, place))
        return example

    return Augmentation(transform, num_copies)


def require_apart(transform: Transform, batch: PyTree) -> None:
    """Refuses a transform that gets the records of a batch `[examples, ...]` together."""
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    # Traced for one record: in a batch, a rule of the user's has replaced what it is for.
    closed = jax.make_jaxpr(transform)(one, jax.random.key(0))
    try:
        jaxprs.require_apart(closed)
    except ValueError as error:
        raise ValueError(f"a transform of records: {error}") from error


def transformed(name: str, transform: Transform, example: PyTree, key: PRNGKey) -> PyTree:
    """Applies one transform, which must keep names, shapes and types."""
    try:
        changed = transform(example, key)
    except ValueError:
        raise
    except Exception as error:
        text = f"{name} must be a function (example, key) -> example that JAX can trace"
        raise ValueError(f"{text}; it raised {type(error).__name__}: {error}") from error
    kinds = [
        jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a).name), each)
        for each in (changed, example)
    ]
    rule = "keep the names, shapes and types of a record"
    checks.require(kinds[0] == kinds[1], name, rule, kinds[0])
    return changed


def _on_images(name: str, change: Callable[[jax.Array, PRNGKey], jax.Array]) -> Transform:
    """Makes a transform of a change of an image, `[height, width]` or with channels last."""

    def transform(example, key):
        x: Any = example.get("x") if isinstance(example, Mapping) else None
        rule = "be given images under 'x', [height, width] or [height, width, channels] of floats "
        rule += "or bytes"
        has_array = hasattr(x, "dtype")
        checks.require(has_array, name, rule, "no array")
        is_number = x.dtype == jnp.uint8 or jnp.issubdtype(x.dtype, jnp.floating)
        fits = is_number and x.ndim in (2, 3)
        checks.require(fits, name, rule, f"{x.dtype}{list(x.shape)}")
        return {**example, "x": change(x, key)}

    transform.__name__ = name
    return transform


def _require_inside(name: str, pixels: int, x: jax.Array, less: int = 0) -> None:
    """Requires a number of pixels of at most the smaller side of an image, or so many less."""
    most = min(x.shape[:2]) - less
    rule = f"be at most {most}, {'one less than ' * bool(less)}the smaller side of the image"
    checks.require(pixels <= most, name, rule, pixels)


def _filling(name: str, fill: float, x: jax.Array) -> jax.Array:
    """Returns the constant beyond the border in the type of an image."""
    rule = "be an integer in [0, 255] for images of bytes"
    fits = x.dtype != jnp.uint8 or (fill == int(fill) and 0 <= fill <= 255)
    checks.require(fits, f"{name}.fill", rule, fill)
    return jnp.asarray(fill, x.dtype)


@checked
def crop(padding: Count, *, mode: Mode = "constant", fill: float = 0.0) -> Transform:
    """Shifts images: pads all sides and cuts the first size out, at a uniformly random place.

    Args:
      padding: pixels on each side, at least 1 and at most a side of the image, or less than one for
        "reflect": images move by at most so many along each axis.
      mode: what is beyond the border: "constant", "edge" (the last pixel), or the image mirrored,
        "reflect" without its last pixel and "symmetric" with it.
      fill: the constant, in the units of the stored images.

    Returns:
      The transform.

    Raises:
      ValueError: for a fill without "constant"; when training is traced, for too wide a padding.
    """
    rule = "be 0 unless mode is 'constant', which alone fills the border"
    checks.require(mode == "constant" or fill == 0, "fill", rule, fill)

    def change(x, key):
        _require_inside("crop.padding", padding, x, less=int(mode == "reflect"))
        widths = [(padding, padding)] * 2 + [(0, 0)] * (x.ndim - 2)
        filled = {"constant_values": _filling("crop", fill, x)} if mode == "constant" else {}
        padded = jnp.pad(x, widths, mode=mode, **filled)
        first = jax.random.randint(key, (2,), 0, 2 * padding + 1)
        return jax.lax.dynamic_slice(padded, [*first, *[0] * (x.ndim - 2)], x.shape)

    return _on_images("crop", change)


@checked
def flip(
    probability: Probability = 0.5, *, direction: Literal["horizontal", "vertical"] = "horizontal"
) -> Transform:
    """Mirrors images with some probability.

    Args:
      probability: in (0, 1].
      direction: "horizontal" exchanges left and right, "vertical" top and bottom.

    Returns:
      The transform.
    """
    axis = 1 if direction == "horizontal" else 0

    def change(x, key):
        return jnp.where(jax.random.bernoulli(key, probability), jnp.flip(x, axis), x)

    return _on_images("flip", change)


@checked
def rotation(degrees: Angle, *, fill: float = 0.0) -> Transform:
    """Rotates images about their centre by a uniformly random angle, with linear interpolation.

    Args:
      degrees: the largest angle in either direction, in (0, 180].
      fill: what is beyond the border, in the units of the stored images.

    Returns:
      The transform.
    """

    def change(x, key):
        limit = math.radians(degrees)
        angle = jax.random.uniform(key, (), minval=-limit, maxval=limit)
        return _rotated(x, angle, _filling("rotation", fill, x))

    return _on_images("rotation", change)


def _rotated(x: jax.Array, angle: jax.Array, fill: jax.Array) -> jax.Array:
    """Rotates one image; a pixel is the mean of the four around its source, by their distance."""
    height, width = x.shape[:2]
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    rows, columns = rows - (height - 1) / 2, columns - (width - 1) / 2
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    row = cosine * rows - sine * columns + (height - 1) / 2
    column = sine * rows + cosine * columns + (width - 1) / 2
    above, left = jnp.floor(row), jnp.floor(column)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    per_channel = (..., *[None] * (x.ndim - 2))

    def corner(i, j):
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        pixel = wide[
            jnp.clip(i, 0, height - 1).astype(jnp.int32),
            jnp.clip(j, 0, width - 1).astype(jnp.int32),
        ]
        weight = (1 - jnp.abs(row - i)) * (1 - jnp.abs(column - j))
        return weight[per_channel] * jnp.where(inside[per_channel], pixel, fill)

    total = corner(above, left) + corner(above, left + 1)
    total = total + corner(above + 1, left) + corner(above + 1, left + 1)
    return _stored(total, x)


def _stored(values: jax.Array, like: jax.Array) -> jax.Array:
    """Converts numbers to the type of an image, bytes to the nearest."""
    if like.dtype != jnp.uint8:
        return values.astype(like.dtype)
    return jnp.round(jnp.clip(values, 0, 255)).astype(jnp.uint8)


@checked
def color(
    *, brightness: Fraction = 0.0, contrast: Fraction = 0.0, saturation: Fraction = 0.0
) -> Transform:
    """Changes brightness, contrast and saturation, in this order, by uniformly random factors.

    Each factor is in [1 - s, 1 + s] for its strength s. Brightness multiplies pixels; contrast
    moves them away from the mean grey of the image, or towards it; saturation away from the grey of
    the same pixel. After each, values outside of [0, 1] are cut off, or outside of bytes.

    Args:
      brightness: its strength, in [0, 1].
      contrast: its strength, in [0, 1].
      saturation: its strength, in [0, 1]; above 0 for images of three channels alone.

    Returns:
      The transform, for images in [0, 1] or of bytes.

    Raises:
      ValueError: if all strengths are 0; when training is traced, for saturation of images without
        three channels.
    """
    strengths = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    rule = "be above 0, or contrast or saturation, to change anything"
    checks.require(any(strengths.values()), "brightness", rule, brightness)

    def grey(x):
        weighted = x * jnp.asarray(_GREY, x.dtype) if x.shape[2:] == (3,) else x[..., None]
        return jnp.sum(weighted, axis=-1, keepdims=True)

    references = {
        "brightness": jnp.zeros_like,
        "contrast": lambda x: jnp.mean(grey(x)),
        "saturation": grey,
    }

    def change(x, key):
        channels = x.shape[2] if x.ndim == 3 else 1
        rule = "be 0 for images without three channels"
        checks.require(not saturation or channels == 3, "color.saturation", rule, saturation)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide / 255 if x.dtype == jnp.uint8 else wide
        for place, (name, strength) in enumerate(strengths.items()):
            if strength == 0:
                continue
            own = jax.random.fold_in(key, place)
            factor = jax.random.uniform(own, (), minval=1 - strength, maxval=1 + strength)
            reference = references[name](wide)
            wide = jnp.clip(reference + factor * (wide - reference), 0, 1)
        return _stored(wide * 255 if x.dtype == jnp.uint8 else wide, x)

    return _on_images("color", change)


@checked
def cutout(size: Count, *, fill: float = 0.0) -> Transform:
    """Fills a square around a uniformly random pixel; what lies beyond the border is cut off.

    Args:
      size: the side of the square in pixels, at least 1 and at most a side of the image.
      fill: what replaces pixels, in the units of the stored images.

    Returns:
      The transform.

    Raises:
      ValueError: when training is traced, for a square larger than the image.

    Source: DeVries and Taylor 2017.
    """

    def change(x, key):
        height, width = x.shape[:2]
        _require_inside("cutout.size", size, x)
        centre = jax.random.randint(key, (2,), 0, jnp.array([height, width]))
        first = centre - size // 2
        rows, columns = np.mgrid[:height, :width]
        inside = (rows >= first[0]) & (rows < first[0] + size)
        inside &= (columns >= first[1]) & (columns < first[1] + size)
        inside = inside.reshape(height, width, *[1] * (x.ndim - 2))
        return jnp.where(inside, _filling("cutout", fill, x), x)

    return _on_images("cutout", change)


def _adopted(own: Any) -> Callable[..., Transform]:
    """Adopts a user's transform: `(example, key) -> example`, or a function of its options."""
    rule = "name a function (example, key) -> example, or a function of options that returns one"
    checks.require(callable(own), "a transform of your own", rule, own)
    return (lambda: own) if list(options_of(own)) == ["example", "key"] else own


TRANSFORMS: Registry[Callable[..., Transform]] = Registry(
    {factory.__name__: factory for factory in (crop, flip, rotation, color, cutout)}, _adopted
)
