"""Augmentation from a configuration: order, own functions, refusals, what it does not change."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, telling

from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.augmentation import augmentation_of
from fedjax_dp.experiment.reading.keys import describe_choice
from fedjax_dp.experiment.schema.config import Config, DataSection
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies.audits import audit_experiment

OWN = """
    import jax.numpy as jnp

    def blank(example, key):
        return {**example, "x": jnp.zeros_like(example["x"])}

    def scaled(*, factor: float = 2.0):
        '''Multiplies inputs.

        Args:
          factor: by which.
        '''
        return lambda example, key: {**example, "x": factor * example["x"]}

    def nothing(*, factor: float = 2.0):
        '''Returns no transform.

        Args:
          factor: not read.
        '''
        return factor

    def asking(example, key):
        return example if example["x"].sum() > 0 else example
"""


@pytest.fixture
def own(tmp_path):
    """A file of a user's transforms."""
    file = tmp_path / "changes.py"
    file.write_text(textwrap.dedent(OWN), encoding="utf-8")
    return str(file)


def config_of(augmentation, copies=1, **sections):
    """A small run of the digits."""
    data = {"num_clients": 4, "augmentation": augmentation, "augmentation_copies": copies}
    run = {"rounds": 2, "evaluate_every": 2}
    return Config(**{"data": data, "run": run, **sections})


def test_transforms_are_applied_in_the_order_of_the_table(own):
    example = {"x": jnp.full((6, 6), 0.5), "y": jnp.int32(0)}

    def values(changes):
        made = augmentation_of(DataSection(augmentation=changes))
        return set(np.unique(made.transform(example, jax.random.key(1))["x"]).tolist())

    scaled, fill = {f"{own}:scaled": {"factor": 3.0}}, {"cutout": {"size": 3, "fill": 1.0}}
    assert values({**fill, **scaled}) == {1.5, 3.0}
    assert values({**scaled, **fill}) == {1.5, 1.0}
    assert values({**fill, f"{own}:blank": {}}) == {0.0}
    assert augmentation_of(DataSection()) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"augmentation": {"crop": {}}}, r"data\.augmentation\.crop must hold 'padding'"),
        ({"augmentation": {"crp": {}}}, r"data\.augmentation must be one of .*'crop'\?"),
        ({"augmentation": {"flip": 1}}, r"data\.augmentation\.flip must be a table"),
        ({"augmentation": {"crop": {"padding": 0}}}, r"augmentation\.crop\.padding must be"),
        ({"augmentation": {"flip": {"chance": 1}}}, r"no option data\.augmentation\.flip\.chance"),
        ({"augmentation_copies": 0}, r"data\.augmentation_copies must be"),
    ],
)
def test_options_are_read_as_those_of_other_parts(data, error):
    with pytest.raises(ConfigError, match=error):
        Config(data=data)


@pytest.mark.parametrize(
    ("data", "sections", "error"),
    [
        ({"augmentation_copies": 2}, {}, r"data\.augmentation_copies must be 1 without data\.aug"),
        ({"augmentation": {"color": {}}}, {}, r"data\.augmentation\.color\.brightness must be abo"),
        (
            {"augmentation": {"crop": {"padding": 1, "mode": "edge", "fill": 1.0}}},
            {},
            r"data\.augmentation\.crop\.fill must be 0 unless mode",
        ),
        (
            {"augmentation": {"flip": {}}, "input_norm": 1.0},
            {},
            r"data\.input_norm must be left out with data\.augmentation",
        ),
        (
            {
                "name": "cifar10",
                "options": {"scaling": "standard"},
                "augmentation": {"color": {"brightness": 0.5}},
            },
            {},
            r"data\.options\.scaling must be 'unit' with data\.augmentation\.color",
        ),
        (
            {"augmentation": {"flip": {}}},
            {
                "model": {"name": "least_squares"},
                "algorithm": {"name": "splitting", "options": {"solver": "exact"}},
                "privacy": {"unit": "none"},
            },
            r"data\.augmentation must be left out for splitting with exact steps",
        ),
        (
            {"augmentation": {"cutout": {"size": 9}}},
            {},
            r"data\.augmentation\.cutout\.size must be",
        ),
        (
            {"augmentation": {"color": {"saturation": 0.5}}},
            {},
            r"data\.augmentation\.color\.saturation must be 0 for images without",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(data, sections, error):
    with pytest.raises(ValueError, match=error):
        assemble(Config(data=data, **sections))


def test_a_table_of_numbers_is_no_image(tmp_path):
    file = tmp_path / "patients.csv"
    file.write_text("age,ill\n" + "\n".join(f"{i},{i % 2}" for i in range(40)), encoding="utf-8")
    ranges = {"age": [0.0, 40.0]}
    options = {"path": str(file), "label": "ill", "scaling": "range", "ranges": ranges}
    data = {"name": "table", "options": options, "num_clients": 2, "augmentation": {"flip": {}}}
    with pytest.raises(
        ValueError, match=r"data\.augmentation\.flip must be given images under 'x'"
    ):
        assemble(Config(data=data))


def test_a_result_that_is_no_transform_is_refused(own):
    with pytest.raises(ValueError, match=r"nothing must return a function \(example, key\)"):
        assemble(config_of({f"{own}:nothing": {}}))
    with pytest.raises(ValueError, match=r"\.asking must .* JAX can trace; it raised Tr"):
        assemble(config_of({f"{own}:asking": {}}))


def test_options_are_listed():
    rows = {
        key: (rule, default) for key, rule, default, _ in describe_choice("data.augmentation=crop")
    }
    assert rows["data.augmentation.crop.padding"][1] == "needed"
    assert rows["data.augmentation.crop.mode"] == (
        "one of 'constant', 'edge', 'reflect', 'symmetric'",
        "constant",
    )
    assert "run.callbacks.early_stopping.patience" in {
        row[0] for row in describe_choice("run.callbacks=early_stopping")
    }


def test_nodes_compare_augmentation_and_the_source_of_own_functions(own):
    from fedjax_dp.flower.apps import described_by

    plain, flipped = described_by(config_of({})), described_by(config_of({"flip": {}}))
    assert plain["section data"] != flipped["section data"]
    named = described_by(config_of({f"{own}:blank": {}}))
    assert f"source of {own}:blank" in named


OPEN = {"privacy": {"unit": "none"}, "algorithm": {"name": "fedavg"}}


def trained(config, *, stops=(2,)):
    """The server's parameters after two rounds, and the experiment."""
    experiment = assemble(config)
    state, done = experiment.simulation.init(jax.random.key(0)), 0
    for stop in stops:
        state, *_ = experiment.simulation.run(state, jax.random.key(0), stop - done)
        done = stop
    return experiment.simulation.federation.shared(state), experiment, state


@telling
def test_training_alone_is_augmented(own):
    """Training sees blank images, on which no gradient of the first layer depends."""
    model = {"name": "mlp", "options": {"hidden_sizes": [5]}}
    config = config_of({f"{own}:blank": {}}, model=model, **OPEN)
    params, experiment, state = trained(config)
    start = experiment.simulation.init(jax.random.key(0))
    before = experiment.simulation.federation.shared(start)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, before)
    assert moved["params"]["Dense_0"]["kernel"] == 0 < moved["params"]["Dense_1"]["bias"]
    found = experiment.evaluator.whole(state)
    test = experiment.population.test.examples
    losses = experiment.model.losses(params, {k: jnp.asarray(v) for k, v in test.items()})[0]
    blank = experiment.model.losses(params, {"x": 0 * test["x"], "y": test["y"]})[0]
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert abs(float(blank.mean()) - float(losses.mean())) > 1e-3


@telling
def test_chunks_and_stops_change_no_draw():
    augmentation = {"crop": {"padding": 2}, "flip": {}}
    results = []
    for chunk, stops in ((1, (2,)), (4, (2,)), (2, (1, 2))):
        config = config_of(
            augmentation, 2, execution={"clients_per_chunk": chunk, "devices": 1}, **OPEN
        )
        results.append(jax.tree.leaves(trained(config, stops=stops)[0]))
    for other in results[1:]:
        for one, right in zip(other, results[0], strict=True):
            np.testing.assert_allclose(one, right, rtol=0, atol=2e-6)
    plain = jax.tree.leaves(trained(config_of({}, **OPEN))[0])
    assert max(np.abs(a - b).max() for a, b in zip(plain, results[0], strict=True)) > 1e-2


@telling
def test_copies_cost_no_privacy():
    records = {"privacy": {"unit": "record"}, "algorithm": {"name": "dp_sgd"}}
    claims = []
    for augmentation, copies in (({}, 1), ({"crop": {"padding": 1}}, 4)):
        experiment = assemble(config_of(augmentation, copies, **records))
        simulation, size = experiment.simulation, int(experiment.population.train.sizes[0])
        (event,) = simulation.algorithm.claims.record.events
        hyper = jax.tree.map(np.asarray, simulation.hyper)
        claims.append((str(event(size, hyper._replace(local=hyper.local.row(0)))), hyper.local))
    assert claims[0][0] == claims[1][0]
    np.testing.assert_array_equal(claims[0][1].noise_multiplier, claims[1][1].noise_multiplier)


@slow
def test_an_audit_reads_records_through_their_augmentation():
    config = config_of(
        {"crop": {"padding": 1}, "flip": {}},
        3,
        privacy={"unit": "record", "record": {"epsilon": 4.0}},
        training={"batch_size": 16, "num_steps": 2},
    )
    report = audit_experiment(assemble(config), num_canaries=8, num_rounds=2, has_membership=False)
    assert not report.is_violated and report.bounds
    checks = {check.name: check for check in report.steps["record"]}
    alone = checks["gradient of a record alone"]
    assert alone.allowed * 0.99 < alone.measured <= alone.allowed
