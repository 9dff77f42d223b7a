"""The zoo: counts from the literature, values, options and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from scipy import signal

from fedjax_dp import models
from fedjax_dp.core import trees
from fedjax_dp.models import cnn

GREY = jax.ShapeDtypeStruct((28, 28, 1), jnp.uint8)
COLOUR = jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8)
CHARS = jax.ShapeDtypeStruct((80,), jnp.int32)
TABLE = jax.ShapeDtypeStruct((13,), jnp.float32)

COUNTS = [
    # Published, or the sum over layers written out.
    ("logistic_regression", GREY, 10, {}, 7_850),
    ("logistic_regression", TABLE, 2, {"single_logit": True}, 14),
    ("logistic_regression", TABLE, 2, {"single_logit": True, "loss": "squared_error"}, 14),
    ("linear_regression", TABLE, 0, {}, 28),
    ("poisson_regression", TABLE, 0, {}, 28),
    ("ordinal_regression", TABLE, 5, {}, 13 + 4),
    ("mlp", TABLE, 0, {"hidden_sizes": (8,), "loss": "squared_error"}, 13 * 8 + 8 + 9 * 2),
    ("mlp", TABLE, 3, {"hidden_sizes": (8,), "loss": "ordinal"}, 13 * 8 + 8 + 8 + 2),
    ("mlp", GREY, 10, {}, 199_210),
    ("mlp", TABLE, 2, {"hidden_sizes": (8,), "single_logit": True}, 13 * 8 + 8 + 9),
    ("thesis_cnn", GREY, 10, {}, 28_938),
    ("fedavg_cnn", GREY, 10, {}, 1_663_370),
    ("lenet5", GREY, 10, {}, 61_706),
    ("lenet5", COLOUR, 10, {}, 62_006),
    ("emnist_cnn", GREY, 62, {}, 1_206_590),
    ("emnist_cnn", GREY, 10, {"dropout": (0.25, 0.5)}, 1_199_882),
    ("resnet18", COLOUR, 10, {}, 11_181_642),
    ("resnet18", COLOUR, 10, {"stem": "cifar"}, 11_173_962),
    ("resnet18", COLOUR, 10, {"norm": "batch"}, 11_181_642 + 9_600),
    ("resnet18", COLOUR, 1000, {}, 11_689_512),
    ("resnet34", COLOUR, 100, {}, 21_335_972),
    ("resnet34", COLOUR, 1000, {"norm": "batch"}, 21_797_672 + 17_024),
    ("char_lstm", CHARS, 90, {}, 820_522),
    ("char_lstm", CHARS, 80, {"num_layers": 1}, 640 + 4 * 256 * 265 + 257 * 80),
    ("char_transformer", CHARS, 80, {}, 115_536),
    # That of pfl-research on Stack Overflow, with as many positions as `CHARS` has.
    (
        "char_transformer",
        CHARS,
        10_000,
        {"width": 96, "num_heads": 8, "num_layers": 3, "intermediate_size": 1536, "is_tied": True},
        96 * (10_000 + CHARS.shape[0])
        + 3 * (4 * (96 * 96 + 96) + 96 * 1536 + 1536 + 1536 * 96 + 96 + 4 * 96)
        + 2 * 96,
    ),
    # TinyLlama-1.1B; no value is drawn.
    (
        "llama",
        CHARS,
        32_000,
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_layers": 22,
            "num_heads": 32,
            "num_kv_heads": 4,
        },
        1_100_048_384,
    ),
    # GPT-2 small.
    (
        "gpt2",
        CHARS,
        50_257,
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_positions": 1024},
        124_439_808,
    ),
    ("bag_of_tokens", CHARS, 2, {}, 257 * 16 + 17 * 2),
    (
        "bag_of_tokens",
        CHARS,
        4,
        {"vocabulary_size": 90, "embedding_size": 10, "hidden_sizes": (8,)},
        90 * 10 + 11 * 8 + 9 * 4,
    ),
]

SMALL_IMAGE = jax.ShapeDtypeStruct((8, 8), jnp.uint8)
WORDS = jax.ShapeDtypeStruct((6,), jnp.int32)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(256, size=(2, 8, 8)).astype(np.uint8)


@pytest.mark.parametrize(("name", "example", "num_classes", "options", "count"), COUNTS)
def test_parameter_counts(name, example, num_classes, options, count):
    # Targets are two numbers, where they are numbers.
    y = jax.ShapeDtypeStruct((2,), jnp.float32)
    model = models.build(name, {"x": example, "y": y}, num_classes, **options)
    assert model.name == name
    assert trees.num_parameters(jax.eval_shape(model.init, jax.random.key(0))) == count


@telling
def test_thesis_cnn_equals_scipy():
    model = models.thesis_cnn(SMALL_IMAGE, 4)
    params = model.init(jax.random.key(5))
    tree = jax.tree.map(np.float64, params["params"])
    oracle = []
    for image in IMAGES:
        planes = image[..., None] / 255.0
        for layer in ("Conv_0", "Conv_1"):
            kernel = tree[layer]["kernel"]
            convolved = [
                sum(
                    signal.correlate2d(planes[..., i], kernel[..., i, o], mode="same")
                    for i in range(kernel.shape[2])
                )
                + tree[layer]["bias"][o]
                for o in range(kernel.shape[3])
            ]
            relu = np.maximum(np.stack(convolved, axis=-1), 0)
            size = relu.shape[0] // 2
            planes = relu.reshape(size, 2, size, 2, -1).max(axis=(1, 3))
        oracle.append(planes.ravel() @ tree["Dense_0"]["kernel"] + tree["Dense_0"]["bias"])
    np.testing.assert_allclose(model.predict(params, IMAGES), oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stem", "sizes"), [("cifar", (32, 16, 8, 4)), ("imagenet", (8, 4, 2, 1))])
def test_resnet_sizes_of_feature_maps(stem, sizes):
    module = cnn._ResNet((2, 2, 2, 2), 10, "group", num_groups=2, stem=stem)
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.uint8)

    def feature_maps(key, x):
        return module.init_with_output(key, x, capture_intermediates=True)[1]["intermediates"]

    maps = jax.eval_shape(feature_maps, jax.random.key(0), images)
    for stage, (size, width) in enumerate(zip(sizes, (64, 128, 256, 512), strict=True)):
        (output,) = maps[f"stage{stage + 1}_block2"]["__call__"]
        assert output.shape == (1, size, size, width)


@telling
def test_lenet5_pads_small_images_to_32_pixels_on_all_sides():
    model = models.lenet5(SMALL_IMAGE, 4)
    params = model.init(jax.random.key(0))
    padded = np.pad(IMAGES, [(0, 0), (12, 12), (12, 12)])
    outputs = model.predict(params, IMAGES)
    np.testing.assert_allclose(outputs, model.predict(params, padded), rtol=1e-6)
    assert np.any(outputs[0] != outputs[1])


@telling
def test_bytes_are_scaled_and_floats_are_not():
    x = IMAGES
    for model in (models.thesis_cnn(SMALL_IMAGE, 4), models.mlp(SMALL_IMAGE, 4)):
        params = model.init(jax.random.key(0))
        scaled = model.predict(params, (x / 255).astype(np.float32))
        np.testing.assert_allclose(model.predict(params, x), scaled, rtol=1e-5, atol=1e-6)
        column = model.predict(params, x[..., None])
        np.testing.assert_array_equal(column, model.predict(params, x))
    table = models.mlp(TABLE, 4, hidden_sizes=(8,))
    params = table.init(jax.random.key(0))
    ages = np.full((1, 13), 40, np.int64)
    np.testing.assert_array_equal(
        table.predict(params, ages), table.predict(params, ages.astype(np.float32))
    )


@telling
@pytest.mark.parametrize("name", ["mlp", "emnist_cnn", "char_transformer"])
def test_dropout_is_an_option_that_acts_in_training_only(name):
    example, x, chosen = {
        "mlp": (TABLE, RNG.normal(size=(2, 13)), {"dropout": 0.5}),
        "emnist_cnn": (SMALL_IMAGE, IMAGES, {"dropout": (0.25, 0.5)}),
        "char_transformer": (
            WORDS,
            RNG.integers(9, size=(2, 6)),
            {"dropout": 0.5, "width": 8, "num_heads": 2},
        ),
    }[name]
    model = models.build(name, {"x": example}, 9, **chosen)
    params = model.init(jax.random.key(0))
    one = model.apply(params, x, is_training=True, key=jax.random.key(1))[0]
    two = model.apply(params, x, is_training=True, key=jax.random.key(2))[0]
    assert np.any(one != two)
    np.testing.assert_array_equal(
        model.apply(params, x, key=jax.random.key(1))[0], model.predict(params, x)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.build("resnt18", {"x": COLOUR}, 10), "did you mean 'resnet18'"),
        (lambda: models.build("mlp", {"x": TABLE}, 2, hiden_sizes=(3,)), "'hidden_sizes'"),
        (lambda: models.build("lenet5", {"x": GREY}, 10, width=3), "lenet5 has no options"),
        (lambda: models.resnet18(COLOUR, 10, num_groups=3), "divide 64, got 3"),
        (lambda: models.resnet18(TABLE, 10), "be an image"),
        (lambda: models.emnist_cnn(jax.ShapeDtypeStruct((5, 5), jnp.uint8), 10), "at least 6"),
        (
            lambda: models.emnist_cnn(GREY, 10, dropout=(0.5, 1.0)),
            r"each entry a number in \[0, 1\), got \(0\.5, 1\.0\)",
        ),
        (
            lambda: jax.eval_shape(lambda rate: models.mlp(TABLE, 2, dropout=rate).loss_fn, 0.5),
            "dropout must be a number that is known when the model is built",
        ),
        (lambda: models.mlp(TABLE, 2, hidden_sizes=(0,)), r"hidden_sizes must be .* an integer of"),
        (lambda: models.mlp(TABLE, 3, single_logit=True), "be 2 with single_logit, got 3"),
        (
            lambda: models.logistic_regression(TABLE, 2, loss="squared_error"),
            "single_logit must be true for loss 'squared_error'",
        ),
        (
            lambda: models.logistic_regression(
                TABLE, 2, single_logit=True, loss="squared_error", gradient_bound=1.0
            ),
            "gradient_bound must be none for loss 'squared_error', which is not convex",
        ),
        (lambda: models.char_lstm(TABLE, 80), "be one row of integer tokens"),
        (lambda: models.char_transformer(CHARS, 80, num_heads=5), "multiple of 5 heads"),
        (lambda: models.bag_of_tokens(TABLE, 2), r"integer tokens, got \(\(13,\), 'float32'\)"),
        (lambda: models.bag_of_tokens(CHARS, 1), "num_classes must be an integer of at least 2"),
    ],
)
def test_bad_input_is_an_error_that_names_argument_rule_and_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_every_registered_model_lists_its_options():
    assert models.options("resnet18") == {"norm": "group", "num_groups": 2, "stem": "imagenet"}
    assert models.options("thesis_cnn") == {}
