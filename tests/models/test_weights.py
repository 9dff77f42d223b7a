"""Weights of classes and examples: their arithmetic, the bound of a record, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight

from fedjax_dp import models
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.clients.gradients import plain as unclipped
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import FederatedData, participation
from fedjax_dp.data.augmentation import compose
from fedjax_dp.data.sampling import full_participation
from fedjax_dp.engine import ExecutionConfig, federation, simulation
from fedjax_dp.evaluation import shared_evaluator
from fedjax_dp.models import Loss, lora, weighted
from fedjax_dp.models.weights import balanced

RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] + RNG.normal(size=40) > 0.8).astype(np.int32)
W = RNG.uniform(0, 3, 40).astype(np.float32)
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
OFFSETS = np.array([0, 15, 40])


def with_weights(weights=W, y=Y):
    return FederatedData({"x": X, "y": y, "example_weight": np.asarray(weights)}, OFFSETS)


def losses_of(model):
    return jax.jit(lambda *args, **named: model.losses(*args, **named)[0])


def test_losses_are_multiplied_and_sums_are_divided_by_the_number_of_examples():
    plain = models.logistic_regression(SHAPE, 2)
    model = weighted(plain, class_weights=(0.5, 4), example_weights="example_weight")
    params = plain.init(jax.random.key(0))
    batch = {"x": X, "y": Y, "example_weight": W}
    losses = np.float64(losses_of(plain)(params, batch))
    expected = losses * np.float64(W) * np.array([0.5, 4])[Y]
    np.testing.assert_allclose(losses_of(model)(params, batch), expected, rtol=1e-6)
    mask = np.arange(40) < 7
    masked = losses_of(model)(params, batch, mask=mask)
    np.testing.assert_allclose(masked, np.where(mask, expected, 0), rtol=1e-6)
    single = models.logistic_regression(SHAPE, 2, single_logit=True)
    values = losses_of(single)(start := single.init(jax.random.key(0)), batch)
    found = losses_of(weighted(single, class_weights=(0.5, 4)))(start, batch)
    np.testing.assert_allclose(found, values * np.array([0.5, 4])[Y], rtol=1e-6)
    # A gradient is divided by the number of examples, whatever the weights.
    rule, key = unclipped(model), jax.random.key(1)

    @jax.jit
    def mean_gradient(params):
        total = rule.micro_batch(params, batch, jnp.ones(40, bool), key, None).gradient
        return rule.release(total, 40, None, key)

    gradient = mean_gradient(params)["params"]["Dense_0"]["kernel"]
    chances = softmax(np.float64(plain.predict(params, X)), axis=1)
    slope = (np.float64(W) * np.array([0.5, 4])[Y])[:, None] * (chances - np.eye(2)[Y])
    np.testing.assert_allclose(gradient, np.float64(X).T @ slope / 40, rtol=1e-4, atol=1e-6)


def test_the_weighted_minimiser_is_that_of_scikit_learn():
    """Newton's method on our losses, with scikit-learn's regulariser."""
    model = weighted(
        models.logistic_regression(SHAPE, 2, single_logit=True),
        class_weights=(1, 3),
        example_weights="example_weight",
    )
    batch, start = {"x": X, "y": Y, "example_weight": W}, model.init(jax.random.key(0))
    flat, unflatten = jax.flatten_util.ravel_pytree(start)

    def objective(flat):
        kernel = unflatten(flat)["params"]["Dense_0"]["kernel"]
        return jnp.sum(model.losses(unflatten(flat), batch)[0]) + jnp.sum(kernel**2) / 2

    slopes_of = jax.jit(lambda flat: (jax.grad(objective)(flat), jax.hessian(objective)(flat)))
    for _ in range(12):
        slope, curvature = slopes_of(flat)
        flat = flat - np.linalg.solve(curvature, slope)
    theirs = LogisticRegression(class_weight={0: 1, 1: 3}, tol=1e-8).fit(X, Y, sample_weight=W)
    found = unflatten(flat)["params"]["Dense_0"]
    np.testing.assert_allclose(found["kernel"][:, 0], theirs.coef_[0], rtol=1e-3)
    np.testing.assert_allclose(found["bias"], theirs.intercept_, rtol=1e-3)


def test_a_weight_acts_before_clipping_so_that_no_record_exceeds_the_bound():
    plain = models.logistic_regression(SHAPE, 2)
    model, bound = weighted(plain, example_weights="example_weight"), 0.5
    rule, params = clipped(model), plain.init(jax.random.key(0))
    config = LocalConfig(learning_rate=1.0, batch_size=1, clip_norm=bound, noise_multiplier=1.0)

    @jax.jit
    def lengths(one):
        own = jax.grad(lambda p: plain.losses(p, one)[0][0])(params)
        total = rule.micro_batch(params, one, jnp.array([True]), jax.random.key(0), config)
        return trees.l2_norm(own), trees.l2_norm(total.gradient)

    for weight in (1e-3, 1.0, 1e6):
        one = {"x": X[:1], "y": Y[:1], "example_weight": np.float32([weight])}
        length, found = (float(x) for x in lengths(one))
        np.testing.assert_allclose(found, min(length * weight, bound), rtol=1e-3)
        assert found <= bound * (1 + 1e-6)


def clipped_mean(gradients, weights, bound, count):
    """Sums gradients by leaf after their weights and their bound, over a count, in float64."""
    scaled = [g * weights.reshape(-1, *[1] * (g.ndim - 1)) for g in gradients]
    norms = np.sqrt(sum(np.sum(g.reshape(len(g), -1) ** 2, axis=1) for g in scaled))
    assert np.any(norms > 2 * bound) and np.any((norms > 0) & (norms < bound / 2))
    factors = np.minimum(1, bound / norms)
    return [np.tensordot(factors, g, 1) / count for g in scaled]


def slopes(logits, y):
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    return chances / chances.sum(-1, keepdims=True) - np.eye(2)[y]


WEIGHTS = np.float64(W) * np.array([0.5, 2])[Y]
BOTH = {"class_weights": (0.5, 2), "example_weights": "example_weight"}


@pytest.mark.parametrize(
    "kind", ["records", *(pytest.param(kind, marks=slow) for kind in ("copies", "adapters"))]
)
def test_the_clipped_sum_of_weighted_gradients_is_divided_by_the_public_count(kind):
    plain, key, x, bound = models.logistic_regression(SHAPE, 2), jax.random.key(4), X[:, None], 0.6
    params, batch = plain.init(key), {"x": X, "y": Y, "example_weight": W}
    config = LocalConfig(learning_rate=1.0, batch_size=16, clip_norm=bound, noise_multiplier=0.0)
    rule = clipped(weighted(plain, **BOTH))
    kernel, bias = (np.float64(params["params"]["Dense_0"][k]) for k in ("kernel", "bias"))
    if kind == "copies":
        shifted = compose(lambda e, k: e | {"x": e["x"] + jax.random.normal(k, (3,))}, num_copies=3)
        rule = rule.augmented(shifted)
        x = shifted.copies(batch, jnp.arange(40), fold(key, Purpose.AUGMENTATION))["x"]
    x = np.float64(x)
    s = slopes(x @ kernel + bias, Y[:, None])
    expected = [s.mean(1), np.einsum("nci,nco->nio", x, s) / x.shape[1]]
    if kind == "adapters":
        name, (down, up) = "params/Dense_0/kernel", (RNG.normal(size=n) for n in ((3, 1), (1, 2)))
        adapted = lora(plain, params, rank=1, targets=name, alpha=2.0)
        rule, params = clipped(weighted(adapted, **BOTH)), adapted.init(key)
        params["adapters"][name] = {"down": jnp.float32(down), "up": jnp.float32(up)}
        s = slopes(X @ (kernel + 2 * down @ up) + bias, Y)
        expected = [
            2 * X[:, :, None] * (s @ up.T)[:, None],
            2 * (X @ down)[:, :, None] * s[:, None],
        ]

    @jax.jit
    def step(params, batch):
        total = rule.micro_batch(params, batch, jnp.ones(40, bool), key, config)
        return rule.release(total.gradient, jnp.int32(40), config, key)

    found = jax.tree.leaves(step(params, batch))
    expected = clipped_mean(expected, WEIGHTS, bound, 16)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize(("placement", "is_on_disk"), [("device", False), ("host", True)])
def test_streamed_clients_and_their_files_have_their_weights(placement, is_on_disk, tmp_path):
    plain, bound = models.logistic_regression(SHAPE, 2), 0.6
    arrays = {"x": X, "y": Y, "example_weight": W}
    if is_on_disk:
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
        arrays = {k: np.load(tmp_path / f"{k}.npy", mmap_mode="r") for k in arrays}
    # Batches are drawn whole, and the noise is below rounding.
    config = LocalConfig(learning_rate=0.5, batch_size=20, clip_norm=bound, noise_multiplier=1e-9)
    model = weighted(plain, **BOTH)
    algorithm = fedavg(model, dp_sgd_trainer(model, config._replace(num_steps=1)))
    sim = simulation(
        algorithm,
        FederatedData(arrays, np.array([0, 20, 40])),
        participation(full_participation(), 2),
        ExecutionConfig(clients_per_chunk=1, placement=placement),
    )
    start = sim.init(jax.random.key(0))
    before = jax.device_get(sim.federation.shared(start))["params"]["Dense_0"]
    end, _, _ = sim.run(start, jax.random.key(1), 1)
    after = sim.federation.shared(end)["params"]["Dense_0"]
    kernel, bias = (np.float64(before[k]) for k in ("kernel", "bias"))
    s = slopes(X @ kernel + bias, Y)
    # The mean over two clients of sums over their 20 records, all of one bound.
    steps = clipped_mean([s, np.float64(X)[:, :, None] * s[:, None]], WEIGHTS, bound, 40)
    for name, step in zip(("bias", "kernel"), steps, strict=True):
        np.testing.assert_allclose(after[name] - before[name], -0.5 * step, rtol=1e-3, atol=1e-6)


def test_evaluations_are_unweighted_and_need_no_weights():
    plain = models.logistic_regression(SHAPE, 2)
    model = weighted(plain, class_weights=(1, 9), example_weights="example_weight")
    params, data = plain.init(jax.random.key(0)), FederatedData({"x": X, "y": Y}, OFFSETS)
    ours, theirs = (shared_evaluator(m, data)(params) for m in (model, plain))
    assert ours.loss == theirs.loss and ours.accuracy == theirs.accuracy


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_weights_out_of_range_are_refused_with_their_row_before_any_work(weight):
    model = weighted(models.logistic_regression(SHAPE, 2), example_weights="example_weight")
    algorithm = fedavg(model, local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=4)))
    draws = participation(full_participation(), 2)
    wrong = np.where(np.arange(40) == 17, weight, 1).astype(np.float32)
    rule = (
        rf"data\['example_weight'\] must hold finite weights of at least 0, got {weight} in row 17"
    )
    with pytest.raises(ValueError, match=rule):
        federation(algorithm, with_weights(wrong), draws)
    with pytest.raises(ValueError, match="examples must hold the weights 'example_weight'"):
        federation(algorithm, FederatedData({"x": X, "y": Y}, OFFSETS), draws)
    with pytest.raises(ValueError, match="must be one number for each example"):
        federation(algorithm, with_weights(np.ones((40, 1), np.float32)), draws)


@pytest.mark.parametrize(
    ("make", "weights", "match"),
    [
        (lambda: models.linear_regression(SHAPE), (1, 2), "left out .* got 'numbers'"),
        (lambda: models.poisson_regression(SHAPE), (1, 2), "left out .* got 'counts'"),
        (lambda: models.logistic_regression(SHAPE, 2), (1, -2), "finite and at least 0"),
        (lambda: models.logistic_regression(SHAPE, 2), (0, 0), "one of them above 0"),
        (lambda: models.logistic_regression(SHAPE, 2), (1, np.inf), "class_weights"),
        (
            lambda: weighted(models.logistic_regression(SHAPE, 2), class_weights=(1, 2)),
            (1, 2),
            "yet",
        ),
    ],
)
def test_weights_of_classes_that_do_not_fit_are_refused(make, weights, match):
    with pytest.raises(ValueError, match=match):
        weighted(make(), class_weights=weights)


@pytest.mark.parametrize(
    ("model", "y", "match"),
    [
        (
            lambda: models.logistic_regression(SHAPE, 3),
            Y,
            "hold 3 weights, one for each class, got 2",
        ),
        (
            lambda: models.ordinal_regression(SHAPE, 3),
            Y,
            "hold 3 weights, one for each class, got 2",
        ),
        (
            lambda: models.logistic_regression(SHAPE, 2, loss="binary_cross_entropy"),
            np.stack([Y, Y], 1),
            "one label for each example with class weights",
        ),
    ],
)
def test_weights_of_classes_that_do_not_fit_the_outputs_are_refused_before_any_work(
    model, y, match
):
    model = weighted(model(), class_weights=(1, 2))
    algorithm = fedavg(model, local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=4)))
    with pytest.raises(ValueError, match=match):
        federation(algorithm, with_weights(y=y), participation(full_participation(), 2))


def test_a_loss_that_declares_nothing_can_have_weights_of_examples_alone():
    model = models.Model.from_functions(
        lambda key: jnp.zeros(3), lambda p, x: x @ p, loss=lambda o, b: jnp.abs(o - b["y"])
    )
    with pytest.raises(ValueError, match="got 'unknown'"):
        weighted(model, class_weights=(1, 2))
    batch = {"x": X, "y": Y, "example_weight": W}
    found = weighted(model, example_weights="example_weight").losses(jnp.ones(3), batch)[0]
    np.testing.assert_allclose(found, np.abs(X.sum(1) - Y) * W, rtol=1e-5, atol=1e-6)
    assert weighted(model) is model
    declared = weighted(
        model._replace(loss_fn=Loss(lambda o, b: o, "ordered")), class_weights=(1, 2)
    )
    assert declared.loss_fn.class_weights == (1, 2)


def test_balanced_weights_are_those_of_scikit_learn():
    labels = np.array([0, 1, 1, 2, 2, 2, 2, -1])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels[:-1])
    np.testing.assert_allclose(balanced(labels, 3), expected)
    with pytest.raises(ValueError, match="as numbers where a class has no training example"):
        balanced(labels, 4)
