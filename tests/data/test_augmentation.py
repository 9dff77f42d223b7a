"""Augmentation against NumPy in float64: each transform by hand, and the law of its draws."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, slow
from scipy import stats

from fedjax_dp.data import augmentation

KEY = jax.random.key(11)
SHAPES = [(6, 9), (7, 5, 1), (8, 8, 3)]
DTYPES = ["float32", "uint8"]


def shapes(soon):
    """All shapes, one of which is tried soon."""
    return later([(shape,) for shape in SHAPES], but=[(soon,)])


def image(shape, dtype="float32", seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, shape)
    return pixels.astype(np.uint8) if dtype == "uint8" else (pixels / 255).astype(np.float32)


def results(transform, x, count=40):
    """The first results of a transform, each with its key."""
    keys = jax.random.split(KEY, count)
    made = jax.jit(jax.vmap(lambda key: transform({"x": jnp.asarray(x), "y": 3}, key)))(keys)
    assert np.all(made["y"] == 3) and made["x"].dtype == x.dtype
    return np.asarray(made["x"])


def uniform(observed, num_outcomes):
    """The p-value of counts of equally likely outcomes."""
    counts = np.bincount(observed, minlength=num_outcomes)
    assert len(counts) == num_outcomes
    return stats.chisquare(counts).pvalue


@pytest.mark.parametrize("dtype", later(DTYPES, but=["float32"]))
@pytest.mark.parametrize("shape", shapes((8, 8, 3)))
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_crops_are_the_windows_of_the_padded_image(shape, dtype, mode):
    x, padding = image(shape, dtype), 2
    fill = {"fill": 7 if dtype == "uint8" else 0.25} if mode == "constant" else {}
    options = {"constant_values": fill["fill"]} if fill else {}
    padded = np.pad(x, [(2, 2), (2, 2)] + [(0, 0)] * (len(shape) - 2), mode, **options)
    windows = [
        padded[i : i + shape[0], j : j + shape[1]]
        for i in range(2 * padding + 1)
        for j in range(2 * padding + 1)
    ]
    for made in results(augmentation.crop(padding, mode=mode, **fill), x, 8):
        assert any(np.array_equal(made, window) for window in windows)


def test_offsets_of_crops_are_uniform_and_a_law_of_fewer_is_rejected():
    # Each pixel says where it was.
    rows, columns = np.mgrid[:12, :12]
    x = np.stack([rows, columns], axis=2).astype(np.float32)

    def offsets(padding):
        made = results(augmentation.crop(padding, fill=-1), x, 4000)
        first = made[:, 6, 6] - 6
        return (first[:, 0] * 5 + first[:, 1] + 12).astype(int)

    assert uniform(offsets(2), 25) > 1e-4
    assert uniform(offsets(1), 25) < 1e-12


@pytest.mark.parametrize("direction, axis", [("horizontal", 1), ("vertical", 0)])
@pytest.mark.parametrize("shape", shapes((6, 9)))
def test_flips_mirror_an_axis_as_often_as_configured(shape, direction, axis):
    x = image(shape)
    made = results(augmentation.flip(0.3, direction=direction), x, 2000)
    mirrored = np.all(made == np.flip(x, axis), axis=tuple(range(1, made.ndim)))
    same = np.all(made == x, axis=tuple(range(1, made.ndim)))
    assert np.all(mirrored ^ same)
    assert stats.binomtest(int(mirrored.sum()), 2000, 0.3).pvalue > 1e-4
    assert stats.binomtest(int(mirrored.sum()), 2000, 0.5).pvalue < 1e-12


def rotated(x, angle, fill):
    """Rotates by interpolation between the four pixels around each source, one pixel at a time."""
    height, width = x.shape[:2]
    out = np.zeros(x.shape)
    middle = (height - 1) / 2, (width - 1) / 2
    for i in range(height):
        for j in range(width):
            up, right = i - middle[0], j - middle[1]
            row = math.cos(angle) * up - math.sin(angle) * right + middle[0]
            column = math.sin(angle) * up + math.cos(angle) * right + middle[1]
            top, left = math.floor(row), math.floor(column)
            a, b = row - top, column - left
            for m, n, weight in (
                (top, left, (1 - a) * (1 - b)),
                (top, left + 1, (1 - a) * b),
                (top + 1, left, a * (1 - b)),
                (top + 1, left + 1, a * b),
            ):
                inside = 0 <= m < height and 0 <= n < width
                out[i, j] += weight * (x[m, n] if inside else fill)
    return out


@pytest.mark.parametrize("shape", shapes((7, 5, 1)))
def test_rotations_interpolate_between_four_pixels(shape):
    x, degrees = image(shape).astype(np.float64), 30.0
    transform = augmentation.rotation(degrees, fill=0.5)
    made = results(transform, x.astype(np.float32), 6)
    angles = [
        float(jax.random.uniform(key, minval=-math.radians(30), maxval=math.radians(30)))
        for key in jax.random.split(KEY, 6)
    ]
    assert len({round(a, 3) for a in angles}) == 6
    for angle, one in zip(angles, made, strict=True):
        np.testing.assert_allclose(one, rotated(x, angle, 0.5), rtol=0, atol=2e-5)
        assert np.abs(one - rotated(x, -angle, 0.5)).max() > 0.05


def test_a_quarter_turn_is_that_of_the_image():
    x = image((9, 9, 3))
    turned = jax.jit(augmentation._rotated)(x, math.pi / 2, 0.0)
    np.testing.assert_allclose(turned, np.rot90(x, -1), rtol=0, atol=1e-5)


@slow
def test_bytes_are_rotated_and_rounded():
    x = image((6, 9), "uint8")
    made = results(augmentation.rotation(180.0), x, 4)
    angles = [
        float(jax.random.uniform(key, minval=-math.pi, maxval=math.pi))
        for key in jax.random.split(KEY, 4)
    ]
    for angle, one in zip(angles, made, strict=True):
        exact = rotated(x.astype(np.float64), angle, 0)
        assert np.abs(one - exact).max() <= 0.51


def colored(x, brightness, contrast, saturation):
    """Applies factors in order; None leaves a change out."""
    weights = np.array([0.299, 0.587, 0.114])
    x = x.astype(np.float64)
    if brightness is not None:
        x = np.clip(brightness * x, 0, 1)
    if contrast is not None:
        grey = (x @ weights if x.ndim == 3 and x.shape[2] == 3 else x).mean()
        x = np.clip(grey + contrast * (x - grey), 0, 1)
    if saturation is not None:
        grey = (x @ weights)[..., None]
        x = np.clip(grey + saturation * (x - grey), 0, 1)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, strengths",
    later(
        [
            ((8, 8, 3), (0.4, 0.0, 0.0)),
            ((8, 8, 3), (0.0, 0.5, 0.0)),
            ((8, 8, 3), (0.0, 0.0, 1.0)),
            ((8, 8, 3), (0.3, 0.6, 0.9)),
            ((7, 5, 1), (0.3, 0.6, 0.0)),
            ((6, 9), (0.3, 0.6, 0.0)),
        ],
        but=[((8, 8, 3), (0.3, 0.6, 0.9))],
    ),
)
def test_colors_are_scaled_around_black_grey_and_the_pixels_grey(shape, strengths, dtype):
    x = image(shape, dtype)
    names = ("brightness", "contrast", "saturation")
    made = results(augmentation.color(**dict(zip(names, strengths, strict=True))), x, 5)
    numbers, moved = x / 255 if dtype == "uint8" else x, 0.0
    for key, one in zip(jax.random.split(KEY, 5), made, strict=True):
        factors = [
            float(jax.random.uniform(jax.random.fold_in(key, i), minval=1 - s, maxval=1 + s))
            if s
            else None
            for i, s in enumerate(strengths)
        ]
        exact = colored(numbers, *factors)
        moved = max(moved, np.abs(exact - numbers).max())
        if dtype == "uint8":
            assert np.abs(one - 255 * exact).max() <= 0.501
        else:
            np.testing.assert_allclose(one, exact, rtol=0, atol=2e-6)
    assert moved > 0.05


@pytest.mark.parametrize("shape", shapes((6, 9)))
@pytest.mark.parametrize("size", later([1, 3, 4], but=[3]))
def test_squares_are_cut_around_any_pixel(shape, size):
    x = image(shape) + 1
    made = results(augmentation.cutout(size, fill=-2), x, 3000)
    cut = made == -2
    assert np.array_equal(made[~cut], np.broadcast_to(x, made.shape)[~cut])
    of_pixels = cut.reshape(*cut.shape[:3], -1)
    assert np.all(of_pixels.all(axis=3) == of_pixels.any(axis=3))
    flat = of_pixels[..., 0]
    height, width = shape[:2]
    patterns = {}
    for i in range(height):
        for j in range(width):
            pattern = np.zeros((height, width), bool)
            first = i - size // 2, j - size // 2
            pattern[max(0, first[0]) : first[0] + size, max(0, first[1]) : first[1] + size] = True
            patterns[pattern.tobytes()] = len(patterns)
    # Each pixel is the centre of one pattern, and all are different.
    assert len(patterns) == height * width
    assert uniform(np.array([patterns[one.tobytes()] for one in flat]), height * width) > 1e-4


def test_transforms_follow_one_another_each_with_its_own_key():
    x = jnp.asarray(image((8, 8, 3)))
    first, second = augmentation.crop(2), augmentation.flip()
    both = augmentation.compose(first, second)
    example = {"x": x, "y": jnp.int32(1), "weight": jnp.float32(2)}
    made = both.transform(example, KEY)
    expected = second(first(example, jax.random.fold_in(KEY, 0)), jax.random.fold_in(KEY, 1))
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    same = augmentation.compose(second, second)
    flips = [same.transform(example, jax.random.key(i))["x"] for i in range(12)]
    # Were the two draws the same, the second flip would always undo the first.
    assert any(not np.array_equal(one, x) for one in flips)


def test_a_copy_depends_on_its_record_row_and_index_alone():
    batch = {"x": jnp.asarray(image((5, 8, 8, 3))), "y": jnp.arange(5)}
    made = augmentation.compose(augmentation.crop(3), num_copies=4)
    rows, copies_of = jnp.array([7, 0, 3, 12, 1]), jax.jit(made.copies)
    copies = copies_of(batch, rows, KEY)
    assert copies["x"].shape == (5, 4, 8, 8, 3)
    np.testing.assert_array_equal(copies["y"], np.repeat(np.arange(5), 4).reshape(5, 4))
    # In another order, one of them twice.
    order = np.array([3, 1, 4, 1, 0])
    part = copies_of(jax.tree.map(lambda a: a[order], batch), rows[order], KEY)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]), part, copies)
    fewer = jax.jit(made._replace(num_copies=2).copies)(batch, rows, KEY)
    np.testing.assert_array_equal(fewer["x"], copies["x"][:, :2])
    same = {**batch, "x": jnp.broadcast_to(batch["x"][:1], (5, 8, 8, 3))}
    alike = np.asarray(copies_of(same, rows, KEY)["x"])
    different = {one.tobytes() for one in alike.reshape(20, -1)}
    # Of 49 windows, twenty draws hit about 17 different ones.
    assert len(different) > 10


def lost(example, key):
    del key
    return {"x": example["x"]}


def doubled(example, key):
    del key
    return {**example, "x": jnp.concatenate([example["x"], example["x"]])}


def widened(example, key):
    del key
    return {**example, "x": example["x"].astype(jnp.float16)}


IMAGE = {
    "x": jax.ShapeDtypeStruct((8, 8, 3), jnp.float32),
    "y": jax.ShapeDtypeStruct((), jnp.int32),
}


@pytest.mark.parametrize("own", [lost, doubled, widened])
def test_transforms_that_change_the_kind_of_a_record_are_refused(own):
    with pytest.raises(ValueError, match=f"{own.__name__} must keep the names, shapes and types"):
        augmentation.compose(own).check(IMAGE)


def kind(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "x, shown",
    [
        (kind(108), r"float32\[108\]"),
        (kind(80, dtype=jnp.int32), r"int32\[80\]"),
        (kind(4, 4, dtype=jnp.int32), r"int32\[4, 4\]"),
        (kind(2, 4, 4, 3), r"float32\[2, 4, 4, 3\]"),
        ({"numbers": kind(4, 4)}, "no array"),
    ],
)
@pytest.mark.parametrize("name", ["crop", "flip", "rotation", "color", "cutout"])
def test_records_that_are_no_images_are_refused_with_their_shape(name, x, shown):
    options = {"crop": [1], "rotation": [5.0], "cutout": [2]}.get(name, [])
    named = {"brightness": 0.5} if name == "color" else {}
    made = augmentation.compose(augmentation.TRANSFORMS[name](*options, **named))
    with pytest.raises(ValueError, match=f"{name} must be given images under 'x'.*{shown}"):
        made.check({"x": x, "y": kind()})


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: augmentation.compose(), "transforms must hold at least one function"),
        (lambda: augmentation.compose(augmentation.flip(), num_copies=0), "num_copies must be"),
        (lambda: augmentation.crop(0), "padding must be"),
        (lambda: augmentation.crop(1, mode="wrap"), "mode must be"),
        (lambda: augmentation.crop(1, mode="edge", fill=1.0), "fill must be 0 unless mode"),
        (lambda: augmentation.flip(0.0), "probability must be"),
        (lambda: augmentation.rotation(181.0), "degrees must be"),
        (lambda: augmentation.color(), "brightness must be above 0, or contrast"),
        (lambda: augmentation.color(contrast=1.5), "contrast must be"),
        (lambda: augmentation.cutout(0), "size must be"),
    ],
)
def test_numbers_out_of_range_are_refused(make, error):
    with pytest.raises(ValueError, match=error):
        make()


@pytest.mark.parametrize(
    "transform, x, error",
    [
        (augmentation.cutout(9), kind(8, 12, 3), "cutout.size must be at most 8, the smaller"),
        (augmentation.crop(9), kind(8, 12, 3), "crop.padding must be at most 8, the smaller"),
        (
            augmentation.crop(13, mode="symmetric"),
            kind(16, 12),
            "padding must be at most 12, the smaller",
        ),
        (
            augmentation.crop(13, mode="edge"),
            kind(16, 12),
            "padding must be at most 12, the smaller",
        ),
        (augmentation.crop(8, mode="reflect"), kind(8, 12), "padding must be at most 7, one less"),
        (augmentation.color(saturation=0.5), kind(8, 8), "color.saturation must be 0 for images"),
        (augmentation.crop(1, fill=0.5), kind(8, 8, dtype=jnp.uint8), "crop.fill must be an int"),
        (augmentation.cutout(1, fill=256.0), kind(8, 8, dtype=jnp.uint8), "cutout.fill must be"),
    ],
)
def test_images_that_do_not_fit_are_refused(transform, x, error):
    with pytest.raises(ValueError, match=error):
        augmentation.compose(transform).check({"x": x, "y": kind()})


@pytest.mark.parametrize("mode, most", [("constant", 8), ("symmetric", 8), ("reflect", 7)])
def test_the_widest_padding_fits(mode, most):
    augmentation.compose(augmentation.crop(most, mode=mode)).check({"x": kind(12, 8)})
