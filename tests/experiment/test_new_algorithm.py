"""A new algorithm: one function and one line of the registry give it keys, sweeps and refusals."""

import pathlib

import pytest
from run_folders import NOT_PRIVATE, SMALL

from fedjax_dp.algorithms import fedavg
from fedjax_dp.algorithms.registry import ALGORITHMS, Entry
from fedjax_dp.core.ranges import NonNegative
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.config_files import load_config, to_toml
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import sweep

seen = []


def newcomer(model, trainer, *, num_clients: int, strength: NonNegative = 0.5, brave: bool = True):
    """Declares nothing new.

    Args:
      model: the model to train.
      trainer: local training.
      num_clients: the population.
      strength: how strongly clients are pulled
        to one another, at least 0.
      brave: whether they dare.
    """
    seen.append((num_clients, strength, brave))
    return fedavg(model, trainer, name="newcomer")


WORDS = (*SMALL, *NOT_PRIVATE[:1], "--algorithm.name=newcomer")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "newcomer", Entry(newcomer, ("none",), ("num_clients",)))


def test_its_options_are_listed_without_the_facts_of_the_run(fedjax_dp):
    _, output, _ = fedjax_dp("run", "--keys", "algorithm.name=newcomer")
    lines = output.splitlines()
    assert [line.split("\t") for line in lines[1:]] == [
        [
            "algorithm.options.strength",
            "a number of at least 0",
            "0.5",
            "how strongly clients are pulled to one another, at least 0.",
        ],
        ["algorithm.options.brave", "true or false", "true", "whether they dare."],
    ]


def test_it_is_given_its_facts_and_options():
    seen.clear()
    experiment = assemble(load_config(None, (*WORDS, "--algorithm.options.strength=2")))
    assert experiment.simulation.algorithm.name == "newcomer"
    assert seen == [(3, 2, True)]


def test_it_claims_the_units_that_it_offers(monkeypatch):
    """Not if its factory leaves the aggregator unused: it would train without any noise."""

    def deaf(model, trainer, *, aggregator=None):
        return fedavg(model, trainer)

    entry = Entry(deaf, ("none", "client"), ("aggregator",))
    monkeypatch.setitem(ALGORITHMS, "deaf", entry)
    words = (*SMALL, "--algorithm.name=deaf", "--privacy.unit=client")
    with pytest.raises(ValueError, match=r"deaf claims no privacy for client: .* the aggregator"):
        assemble(load_config(None, words))


def test_it_is_swept(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(to_toml(load_config(None, WORDS)), encoding="utf-8")
    axis = {text: (f"--algorithm.options.strength={text}",) for text in ("0", "0.5", "1e3")}
    study = sweep.Study("study", pathlib.Path(file), {"strength": axis}, "strength", "strength", {})
    found = [load_config(file, point.words) for point in sweep.grid_points(study, {}, ())]
    assert [c.algorithm.options["strength"] for c in found] == [0, 0.5, 1000.0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("strength=true", "options.strength must be a number of at least 0, got True"),
        ("strenght=1", "did you mean 'strength'?"),
        ("num_clients=3", "there is no option algorithm.options.num_clients of newcomer"),
    ],
)
def test_what_it_cannot_take_is_refused_before_any_work(word, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, (*WORDS, f"--algorithm.options.{word}"))
    assert str(error.value).startswith("command line: ") and message in str(error.value)
