"""Local training against NumPy: optimisers, batches, micro-batches, counts, errors."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import later, slow, telling
from oracles import logistic
from oracles.replay import Replay
from small_problem import make_model, theta_of

from fedjax_dp.clients import ClientData, LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.data import sampling

SIZE = 11
KEY = jax.random.key(7)


def make_examples(size=SIZE, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.float32)}


def client_data(examples, *, limit=None, chunk_axis=None):
    size = len(examples["y"])
    return ClientData(
        jax.tree.map(jnp.asarray, examples),
        jnp.int32(0),
        jnp.int32(size),
        jnp.int32(0),
        limit or size,
        chunk_axis,
    )


def run(trainer, config, examples=None, key=KEY):
    """Trains one client of index 0 from the model's start, compiled."""
    examples = make_examples() if examples is None else examples
    start = make_model().init(jax.random.key(0))
    train = jax.jit(lambda start, data, config: trainer.train(start, data, config, key))
    return start, train(start, client_data(examples), config)


def replayed(config, sampler, size=SIZE):
    """The draws of `run`: its key stands where a round's client key would."""
    replay = Replay(KEY, None, sampler, [size], np.array([config.batch_size]), [(), (3,)])
    replay._client_key = lambda round_index, client: KEY
    return replay


def descend(start, examples, batches, step):
    """Runs `step(theta, gradient, t) -> theta` over batches, in float64."""
    theta, x, y = theta_of(start), *(np.asarray(examples[k], np.float64) for k in "xy")
    for t, rows in enumerate(batches, start=1):
        gradient = logistic.gradients(theta, x[rows], y[rows]).mean(axis=0)
        theta = step(theta, gradient, t)
    return theta


class Momentum:
    def __init__(self, rate, decay):
        self.rate, self.decay, self.velocity = rate, decay, 0.0

    def __call__(self, theta, gradient, t):
        self.velocity = self.decay * self.velocity + gradient
        return theta - self.rate * self.velocity


class Adam:
    def __init__(self, rate):
        self.rate, self.m, self.v = rate, 0.0, 0.0

    def __call__(self, theta, gradient, t):
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**t), self.v / (1 - 0.999**t)
        return theta - self.rate * m / (np.sqrt(v) + 1e-8)


@telling
@pytest.mark.parametrize(
    "optimizer, oracle",
    [
        (lambda rate: optax.sgd(rate, momentum=0.9), Momentum(0.1, 0.9)),
        (optax.adam, Adam(0.1)),
        (optax.sgd(0.3), Momentum(0.3, 0.0)),
    ],
    ids=["momentum", "adam", "ready sgd that ignores the configured rate"],
)
def test_any_optax_optimiser(optimizer, oracle):
    config = LocalConfig(learning_rate=0.1, batch_size=4, num_epochs=2)
    trainer = local_trainer(make_model(), config, optimizer=optimizer)
    start, result = run(trainer, config)
    batches = replayed(config, sampling.shuffled()).batches(0, 0, 6)
    expected = descend(start, make_examples(), batches, oracle)
    np.testing.assert_allclose(theta_of(result.params), expected, atol=1e-5)
    delta = expected - theta_of(start)
    np.testing.assert_allclose(theta_of(result.delta), delta, atol=1e-5)
    assert result.num_steps == 6 and result.weight == SIZE


def test_full_batches_are_gradient_descent():
    config = LocalConfig(learning_rate=0.5, batch_size=1, num_steps=5)
    trainer = local_trainer(make_model(), config, sampler=sampling.full_participation())
    start, result = run(trainer, config)
    expected = descend(start, make_examples(), [np.arange(SIZE)] * 5, Momentum(0.5, 0.0))
    np.testing.assert_allclose(theta_of(result.params), expected, atol=1e-5)


@telling
@pytest.mark.parametrize(
    "sampler",
    [sampling.shuffled(), sampling.poisson(), pytest.param(sampling.fixed_size(), marks=slow)],
)
@pytest.mark.parametrize("is_private", later([False, True], but=[True]))
def test_micro_batches_change_nothing(sampler, is_private):
    numbers = {"clip_norm": 0.5, "noise_multiplier": 0.7} if is_private else {}
    if is_private and sampler.name == "shuffled":
        pytest.skip("refused")
    config = LocalConfig(0.2, 5, 2, **numbers)
    make = dp_sgd_trainer if is_private else local_trainer
    results = [
        run(make(make_model(), config, sampler=sampler, micro_batch_size=micro), config)[1]
        for micro in (None, 3)
    ]
    for other in results[1:]:
        np.testing.assert_allclose(
            theta_of(other.params), theta_of(results[0].params), rtol=0, atol=1e-6
        )
        assert other.metrics.num_read == results[0].metrics.num_read


@telling
def test_clients_side_by_side_train_as_one_by_one():
    """Sizes, batches, epochs and rates differ; one vectorised call does them all."""
    model = make_model()
    sizes = np.array([11, 0, 3, 7], np.int32)
    config = LocalConfig(
        np.array([0.1, 0.2, 0.3, 0.05]), np.array([4, 2, 8, 3]), np.array([1, 5, 2, 3])
    )
    trainer = local_trainer(model, config, micro_batch_size=2)
    examples = jax.tree.map(jnp.asarray, make_examples(40))
    start = model.init(jax.random.key(0))

    def one(i, size, axis):
        data = ClientData(examples, i * 11, size, i, 11, axis)
        return trainer.train(start, data, config.row(i), jax.random.fold_in(KEY, i))

    together = jax.jit(jax.vmap(lambda i, s: one(i, s, "chunk"), axis_name="chunk"))(
        jnp.arange(4), sizes
    )
    alone = jax.jit(lambda i, s: one(i, s, None))
    # Passes of two examples in each step: batches of 4, 4, 3; of 3 twice; of 3, 3, 1 thrice.
    passes = [[2, 2, 2], [], [2, 2], [2, 2, 1] * 3]
    for i in range(4):
        single = alone(i, sizes[i])
        row = trees.take(together, i)
        np.testing.assert_allclose(theta_of(row.params), theta_of(single.params), rtol=0, atol=1e-6)
        for name in ("loss_sum", "num_read", "num_clipped", "num_overflow"):
            of_row, of_single = getattr(row.metrics, name), getattr(single.metrics, name)
            np.testing.assert_allclose(of_row, of_single, rtol=1e-5)
        assert row.num_steps == single.num_steps
        # Side by side, a step makes as many passes as its largest batch; that work is reported.
        widest = [max(p[t] for p in passes if t < len(p)) for t in range(len(passes[i]))]
        assert row.metrics.num_computed == 2 * sum(widest)
        assert single.metrics.num_computed == 2 * sum(passes[i])


@pytest.mark.parametrize("num_epochs", [0, 0.5, 1, 2.5])
@pytest.mark.parametrize("batch_size", [1, 4, 11, 50])
def test_number_of_steps(num_epochs, batch_size):
    config = LocalConfig(0.1, batch_size, num_epochs)
    trainer = local_trainer(make_model(), config)
    expected = math.ceil(math.ceil(SIZE / batch_size) * num_epochs)
    assert int(trainer.num_steps(SIZE, config)) == expected
    assert int(trainer.num_steps(0, config)) == 0


def test_each_epoch_reads_every_example_once():
    config = LocalConfig(0.0, 4, 3)
    start, result = run(local_trainer(make_model(), config), config)
    assert result.metrics.num_read == 3 * SIZE
    examples = make_examples()
    losses = logistic.losses(theta_of(start), examples["x"].astype(float), examples["y"])
    np.testing.assert_allclose(result.metrics.loss_sum, 3 * losses.sum(), rtol=1e-5)
    # Three blocks of four for eleven examples: one twelfth of the work is padding.
    assert result.metrics.num_computed == 36


def test_no_epochs_leave_the_model_where_it_was():
    config = LocalConfig(0.1, 4, 0)
    start, result = run(local_trainer(make_model(), config), config)
    np.testing.assert_array_equal(theta_of(result.params), theta_of(start))
    assert result.num_steps == 0 and result.metrics.num_read == 0


SETTINGS = [(b, e) for b in (1, 3, 3.3, 2.7, 7.77, 16.5) for e in (1, 0.1, 1 / 3, 2.5)]


@pytest.mark.parametrize(
    "batch_size, num_epochs", later(SETTINGS, but=[s for s in SETTINGS if s[0] in (1, 7.77)])
)
def test_steps_that_run_are_the_steps_that_are_accounted(batch_size, num_epochs):
    """Device arithmetic in float32 and the host's agree, for every size up to 400."""
    config = LocalConfig(0.1, batch_size, num_epochs, clip_norm=1.0, noise_multiplier=1.0)
    trainer = dp_sgd_trainer(make_model(), config)
    traced = jax.tree.map(jnp.float32, config)
    sizes = np.arange(400, dtype=np.int32)
    steps = jax.jit(jax.vmap(trainer.num_steps, in_axes=(0, None)))(sizes, traced)
    for size in (0, 1, 2, 17, 33, 99, 128, 399):
        event = trainer.claim.events[0](size, config)
        if size == 0 or steps[size] == 0:
            assert isinstance(event, dp_accounting.NoOpDpEvent)
        else:
            assert event.count == steps[size]
    accounted = [int(trainer.num_steps(size, config)) for size in sizes]
    np.testing.assert_array_equal(steps, accounted)


def test_event_is_what_runs():
    config = LocalConfig(0.1, 5, 2, clip_norm=0.5, noise_multiplier=0.7)
    event = dp_sgd_trainer(make_model(), config).claim.events[0](20, config)
    assert event.count == 8
    assert isinstance(event.event, dp_accounting.PoissonSampledDpEvent)
    assert event.event.sampling_probability == 5 / 20
    assert event.event.event.noise_multiplier == pytest.approx(0.7)
    # A batch as large as the data is no sample at all.
    whole = dp_sgd_trainer(make_model(), config).claim.events[0](4, config)
    assert isinstance(whole.event, dp_accounting.GaussianDpEvent)


@telling
def test_no_noise_and_no_bound_are_the_plain_sum_over_the_public_size():
    """A clip norm of infinity with a multiplier of zero is the reference without privacy."""
    config = LocalConfig(0.3, 4, 1, clip_norm=np.inf, noise_multiplier=0.0)
    start, result = run(dp_sgd_trainer(make_model(), config), config)
    examples = make_examples()
    x, y = examples["x"].astype(float), examples["y"].astype(float)
    theta = theta_of(start)
    for rows in replayed(config, sampling.poisson()).batches(0, 0, 3):
        theta = theta - 0.3 * logistic.gradients(theta, x[rows], y[rows]).sum(axis=0) / 4
    assert np.abs(theta - theta_of(start)).max() > 1e-2
    np.testing.assert_allclose(theta_of(result.params), theta, atol=1e-5)


@telling
def test_truncated_batches_count_what_found_no_slot():
    config = LocalConfig(0.1, 8, 4, clip_norm=1.0, noise_multiplier=1.0)
    trainer = dp_sgd_trainer(make_model(), config, sampler=sampling.poisson(capacity=6))
    _, result = run(trainer, config)
    batches = [len(rows) for rows in replayed(config, sampling.poisson()).batches(0, 0, 8)]
    assert result.metrics.num_overflow == sum(max(0, n - 6) for n in batches) > 0
    assert result.metrics.num_read == sum(min(n, 6) for n in batches)
    truncated = trainer.claim.events[0](SIZE, config).event
    assert truncated.truncated_batch_size == 6 and truncated.dataset_size == SIZE


def test_update_transforms_apply_in_order():
    config = LocalConfig(0.1, 4, 1)
    plain = run(local_trainer(make_model(), config), config)[1].delta
    transforms = (
        lambda d, c: jax.tree.map(lambda x: x + 1, d),
        lambda d, c: jax.tree.map(lambda x: 2 * x, d),
    )
    trainer = local_trainer(make_model(), config, update_transforms=transforms)
    changed = run(trainer, config)[1]
    np.testing.assert_allclose(theta_of(changed.delta), 2 * (theta_of(plain) + 1), rtol=1e-6)
    norm = np.linalg.norm(theta_of(changed.delta))
    np.testing.assert_allclose(changed.metrics.update_norm, norm, rtol=1e-6)


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"batch_size": np.array([2, 0])}, "batch_size must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be an integer with the sampler 'shuffled'"),
        ({"num_steps": 1.5}, "num_steps must be an integer"),
    ],
)
def test_bad_numbers_are_refused_by_name(numbers, message):
    with pytest.raises(ValueError, match=message):
        local_trainer(make_model(), LocalConfig(**numbers))


def test_numbers_for_another_population_are_refused():
    config = LocalConfig(learning_rate=np.ones(3))
    config.validate(3)
    with pytest.raises(ValueError, match="learning_rate must be one number or have one for"):
        config.validate(4)


def test_mixing_models_are_refused_where_batches_would_change_their_result():
    mixing = make_model()._replace(mixes_examples=True)
    with pytest.raises(ValueError, match="micro_batch_size must be None"):
        local_trainer(mixing, LocalConfig(), micro_batch_size=2)
    with pytest.raises(ValueError, match="sampler must draw a fixed number"):
        local_trainer(mixing, LocalConfig(), sampler=sampling.poisson())
    with pytest.raises(ValueError, match="micro_batch_size must be an integer of at least 1"):
        local_trainer(make_model(), LocalConfig(), micro_batch_size=0)
