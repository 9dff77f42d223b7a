"""Anderson acceleration by configuration: what is refused, what it does, how a run resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, telling
from run_folders import DRAWN, SMALL, assert_same_run, die_and_resume, execute, metrics, read_json

from fedjax_dp import algorithms
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import compile_federation, federation
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.components.wrappers import wrapper_of
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.models.dense import least_squares

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory=2",), "acceleration.memory must be below the 2 rounds, got 2"),
        (("memory=1", "first=0"), "acceleration.first must be at least the memory, 1"),
        (("damping=0.5",), "acceleration.damping must be left out without an acceleration.memory"),
        (("memory=1", "weights=equal"), "acceleration.weights must be left out for"),
    ],
)
def test_what_cannot_be_is_refused_before_data_are_read(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(population.datasets, "load", None)
    given = [f"--acceleration.{word}" for word in words]
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *FEDAVG, *given)
    assert message in str(error.value)


def test_a_plain_run_is_written_as_before_there_was_acceleration():
    config = load_config(None, [*SMALL, *FEDAVG])
    assert "acceleration" not in config_files.to_toml(config)
    fast = load_config(None, [*SMALL, *FEDAVG, "--acceleration.memory=1"])
    assert "memory = 1" in config_files.to_toml(fast)


SIZES = (2, 5, 12)


def accelerated(*words):
    """Three clients of unequal sizes under `acceleration.*`, and their data."""
    rng = np.random.default_rng(0)
    pairs = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n) + 2} for n in SIZES]
    data = FederatedData.from_clients([{k: a.astype("f4") for k, a in p.items()} for p in pairs])
    model = least_squares(jax.ShapeDtypeStruct((3,), jnp.float32))
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=12, num_steps=1))
    options = {"client_map": "gradient", "form": "centralised", "beta": 0.5, "is_weighted": True}
    algorithm = algorithms.splitting(model, trainer, **options)
    all_clients = participants.participation(sampling.full_participation(), len(SIZES))
    given = ["--run.rounds=4", "--acceleration.memory=1", "--acceleration.of=clients"]
    config = load_config(None, [*given, *(f"--acceleration.{word}" for word in words)])
    wrapper = wrapper_of(config, model, len(SIZES), None)
    return wrapper(federation(algorithm, data, all_clients)), data


@telling
def test_weights_of_the_configuration_are_those_of_the_norm():
    """By size if not given, as in the mean of clients of unequal sizes."""
    key, models = jax.random.key(0), []
    for words in ((), ("weights=equal",)):
        sim = compile_federation(*accelerated(*words))
        models.append(sim.federation.shared(sim.run(sim.init(key), key, 4)[0]))
    # Of 0.15, the largest entry.
    assert np.abs(models[0] - models[1]).max() > 5e-3


def test_weights_of_the_configuration_have_one_for_each_client():
    accelerated("weights=[1,0,2]")
    with pytest.raises(
        ValueError, match=r"weights must be one number .* for each of the 3 clients"
    ):
        accelerated("weights=[1,2]")


@slow
def test_an_accelerated_run_resumes_and_states_what_the_plain_one_does(tmp_path):
    fast = (*DRAWN, "--acceleration.memory=2", "--acceleration.damping=0.5")
    whole, cut, plain = (tmp_path / name for name in ("whole", "cut", "plain"))
    with pytest.warns(UserWarning, match="heuristic"):
        assert execute(whole, *fast)[0] == 0
    die_and_resume(cut, 4, *fast)
    assert_same_run(whole, cut)
    assert execute(plain, *DRAWN)[0] == 0
    spent = [read_json(folder, "summary.json")["epsilon"] for folder in (whole, plain)]
    assert spent[0] == spent[1]
    claims = [read_json(folder, "privacy.json")["claims"] for folder in (whole, plain)]
    assert claims[0] == claims[1]
    assert any(row["is_mixed"] for row in metrics(whole)[3:])
