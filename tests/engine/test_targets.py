"""Targets that a loss is not for are refused where data and model first meet."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import telling
from small_problem import ALONE, make_data, make_model

from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.audit import attack_model
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.data import FederatedData, participation
from fedjax_dp.data.sampling import full_participation
from fedjax_dp.engine import evaluator, federation, simulation
from fedjax_dp.evaluation import heterogeneity, metrics, personal_evaluator, shared_evaluator
from fedjax_dp.models import Loss, Model, losses
from fedjax_dp.server.base import Fate

ROWS = 12
CONFIG = LocalConfig(learning_rate=0.1, batch_size=4, clip_norm=1.0, noise_multiplier=0.5)


def linear(loss, width=2):
    return Model.from_functions(
        lambda key: {"w": jnp.ones((3, width))}, lambda params, x: x @ params["w"], loss=loss
    )


def store(y):
    x = np.arange(3.0 * ROWS, dtype=np.float32).reshape(ROWS, 3) / ROWS
    return FederatedData({"x": x, "y": np.asarray(y)}, np.array([0, 5, 5, ROWS]))


def own_softmax(outputs, batch):
    return losses.softmax_cross_entropy(outputs, batch["y"]) * 2


def algorithm_of(model, make=local_trainer):
    return fedavg(model, make(model, CONFIG))


def bound(algorithm, data, build=federation, **options):
    draws = participation(full_participation(), data.num_clients)
    return build(algorithm, data, draws, **options)


SIGNS, FROM_ONE, THREE = np.tile([1, 1, -1], 4), np.tile([1, 2], 6), np.tile([0, 1, 2], 4)
FIRST = "in row 2 \\(client 0\\), the first of 4 such rows of 12"


@pytest.mark.parametrize(
    ("loss", "width", "y", "match"),
    [
        ("softmax_cross_entropy", 2, SIGNS, rf"from 0 to 1, .* 2 outputs, got -1 {FIRST}"),
        ("softmax_cross_entropy", 2, FROM_ONE, "got 2 in row 1"),
        ("softmax_cross_entropy", 2, THREE, f"got 2 {FIRST}"),
        ("softmax_cross_entropy", 3, np.array([0, 1, 2, -100] * 3, np.int16), "got -100 in row 3"),
        (own_softmax, 2, SIGNS, f"got -1 {FIRST}"),
        (Loss(lambda o, b: o[:, 0], "classes"), 2, SIGNS, f"got -1 {FIRST}"),
        ("sigmoid_binary_cross_entropy", 1, SIGNS, f"labels 0 and 1, .* got -1 {FIRST}"),
        ("sigmoid_binary_cross_entropy", 1, THREE, f"got 2 {FIRST}"),
        ("sigmoid_binary_cross_entropy", 1, np.where(SIGNS < 0, np.nan, 1.0), f"got nan {FIRST}"),
        ("sigmoid_binary_cross_entropy", 2, np.stack([SIGNS, SIGNS], 1), f"got -1 {FIRST}"),
        ("softmax_cross_entropy", 2, THREE.astype(np.float32), "labels must be integers or Bool"),
        ("softmax_cross_entropy", 3, np.eye(3)[THREE], r"argmax\(-1\) makes classes of one-hot"),
        ("softmax_cross_entropy", 3, np.eye(4, dtype=bool)[THREE], "argmax.* soft labels need a"),
        ("softmax_cross_entropy", 3, THREE[:, None], r"y\[..., 0\] drops the last axis"),
        ("squared_error", 1, np.where(SIGNS < 0, np.nan, 1.0), f"finite numbers .*got nan {FIRST}"),
        ("half_squared_error", 1, np.where(SIGNS < 0, np.inf, 1.0), f"got inf {FIRST}"),
        (Loss(lambda o, b: o[:, 0], "numbers"), 1, np.where(SIGNS < 0, np.nan, 1.0), "got nan"),
    ],
)
def test_other_targets_are_refused_before_any_work(loss, width, y, match):
    model, data = linear(loss, width), store(y)
    with pytest.raises(ValueError, match=match):
        bound(algorithm_of(model), data)
    with pytest.raises(ValueError, match=match):
        shared_evaluator(model, data)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", own_softmax])
def test_whatever_reads_targets_refuses_others(loss):
    model, data, right = linear(loss, 2), store(SIGNS), store(np.zeros_like(SIGNS))
    plain = bound(algorithm_of(model), right)
    for refused in (
        lambda: bound(algorithm_of(model, dp_sgd_trainer), data),
        lambda: evaluator(plain, model, right, whole=data),
        lambda: evaluator(plain, model, right, clients=data),
        lambda: heterogeneity(model, data, {"w": jnp.ones((3, 2))}),
    ):
        with pytest.raises(ValueError, match=f"got -1 {FIRST}"):
            refused()


@pytest.mark.parametrize(
    ("loss", "width", "y"),
    [
        ("softmax_cross_entropy", 3, THREE),
        ("softmax_cross_entropy", 2, SIGNS > 0),
        (Loss("softmax_cross_entropy", ignore_label=-1), 2, SIGNS),
        ("sigmoid_binary_cross_entropy", 1, SIGNS > 0),
        ("sigmoid_binary_cross_entropy", 1, np.linspace(0, 1, ROWS).astype(np.float32)),
        ("squared_error", 1, SIGNS.astype(np.float32)),
        (lambda o, b: jax.nn.relu(1 - o[:, 0] * b["y"]), 1, SIGNS),
    ],
)
def test_targets_of_the_loss_are_accepted(loss, width, y):
    model, data = linear(loss, width), store(y)
    bound(algorithm_of(model), data)
    shared_evaluator(model, data)


@pytest.mark.parametrize("name", [n for n in metrics.METRICS if n not in ("mae", "mse", "r2")])
@pytest.mark.parametrize("targets", [None, "classes"])
def test_metrics_of_classes_refuse_soft_labels_before_any_work(name, targets):
    def soft(outputs, batch):
        return optax.softmax_cross_entropy(outputs, batch["y"])

    loss = soft if targets is None else Loss(soft, targets)
    with pytest.raises(ValueError, match=r"argmax\(-1\) makes classes of one-hot labels; soft"):
        shared_evaluator(
            linear(loss, 3),
            store(np.full((ROWS, 3), 1 / 3, np.float32)),
            metrics={name: metrics.METRICS[name]()},
        )


@pytest.mark.parametrize("is_declared", [False, True])
def test_padding_of_sequences_is_reported_unless_it_is_declared(is_declared):
    loss = Loss("softmax_cross_entropy", ignore_label=-1 if is_declared else None)
    model = Model.from_functions(
        lambda key: {"w": jnp.ones((3, 2))}, lambda p, x: x[:, :, None] * p["w"], loss=loss
    )
    data = store(np.stack([SIGNS, SIGNS, 0 * SIGNS], 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bound(algorithm_of(model), data)
        shared_evaluator(model, data)
    found = [str(w.message) for w in caught if "has no target, -1, in 8 places" in str(w.message)]
    assert len(found) == (0 if is_declared else 2)


def test_what_leaves_the_owner_of_the_data_is_the_rule_alone():
    """On a node of a deployment the error reaches the server, without label, row and count."""
    with pytest.raises(GuardedError) as caught:
        bound(algorithm_of(linear("softmax_cross_entropy")), store(SIGNS))
    rule = "data['y'] must hold classes from 0 to 1, as the model has 2 outputs"
    assert caught.value.public == rule and str(caught.value).startswith(f"{rule}, got -1 in row 2")


def test_attacked_examples_are_checked_too():
    model, params = linear("softmax_cross_entropy"), {"w": jnp.ones((3, 2))}
    right, wrong = store(1 * (SIGNS > 0)).examples, store(SIGNS).examples
    for what, sides in (("members", (wrong, right)), ("others", (right, wrong))):
        with pytest.raises(ValueError, match=rf"{what}\['y'\] must hold classes from 0 to 1"):
            attack_model(model, params, *sides, np.random.default_rng(0))


def test_a_second_split_is_checked_too():
    model = linear("softmax_cross_entropy")
    with pytest.raises(ValueError, match=r"validation\['y'\] must hold classes"):
        bound(algorithm_of(model), store(1 * (SIGNS > 0)), simulation, validation=store(SIGNS))


def test_targets_on_disk_are_checked_when_they_are_read(tmp_path):
    data, model = make_data(), make_model()
    y = data.examples["y"].copy()
    y[data.offsets[3]] = 2.0
    FederatedData({**data.examples, "y": y}, data.offsets).save(tmp_path)
    stored, algorithm = FederatedData.open(tmp_path), algorithm_of(model)
    found = r"data\['y'\] must hold labels 0 and 1, .* got 2.0"
    with pytest.raises(ValueError, match=found):
        bound(algorithm, stored, simulation, execution=ALONE._replace(placement="device"))
    sim = bound(algorithm, stored, simulation, execution=ALONE._replace(placement="host"))
    with pytest.raises(ValueError, match=found):
        sim.run(sim.init(jax.random.key(0)), jax.random.key(1))
    own = personal_evaluator(model, stored, lambda index, params: params)
    for evaluate in (shared_evaluator(model, stored), own):
        with pytest.raises(ValueError, match=found):
            evaluate(model.init(jax.random.key(0)))


@telling
@pytest.mark.parametrize("make", [local_trainer, dp_sgd_trainer])
@pytest.mark.parametrize("where", ["loss", "outputs", "one loss"])
def test_losses_that_are_no_numbers_are_shown_and_change_nothing(make, where):
    def apply(params, x):
        return x @ params["w"] * (jnp.nan if where == "outputs" else 1.0)

    def loss(outputs, batch):
        is_bad = (batch["y"] == 2) if where == "one loss" else (where == "loss")
        return jnp.where(is_bad, jnp.nan, outputs[:, 0] ** 2)

    model = Model.from_functions(lambda key: {"w": jnp.ones((3, 2))}, apply, loss=loss)
    sim = bound(algorithm_of(model, make), store(THREE), simulation, execution=ALONE)
    state, record, info = sim.run(sim.init(jax.random.key(0)), jax.random.key(1))
    assert np.isnan(info.training.train_loss).all()
    assert np.isfinite(sim.federation.shared(state)["w"]).all()
    is_lost = make is local_trainer and where == "outputs"
    assert record.count(Fate.NOT_FINITE).tolist() == [2 if is_lost else 0]
