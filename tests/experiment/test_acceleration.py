"""Anderson acceleration by configuration: what is refused, what a run leaves, how it goes on."""

import pytest
from marks import slow
from run_folders import (
    DRAWN,
    SMALL,
    Killed,
    assert_same_run,
    execute,
    kill_after,
    metrics,
    read_json,
)

from fedjax_dp.experiment import population
from fedjax_dp.experiment import reading as configuration

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory=0",), "acceleration.memory must be a whole number of at least 1"),
        (("memory=-1",), "acceleration.memory must be a whole number of at least 1"),
        (("memory=2",), "acceleration.memory must be below the 2 rounds, got 2"),
        (("memory=1", "first=0"), "acceleration.first must be at least acceleration.memory = 1"),
        (("memory=1", "damping=1.5"), "acceleration.damping must be a number in [0, 1]"),
        (("damping=0.5",), "acceleration.damping must be left out without an acceleration.memory"),
        (("memory=1", "of=server"), "acceleration.of must be one of 'shared', 'clients'"),
        (("memory=1", "weights=equal"), "acceleration.weights must be left out for"),
        (("memory=1", "of=clients", "weights=-1"), "acceleration.weights must be"),
    ],
)
def test_what_cannot_be_is_refused_before_data_are_read(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(population.datasets, "load", None)
    given = [f"--acceleration.{word}" for word in words]
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *FEDAVG, *given)
    assert message in str(error.value)


def test_a_plain_run_is_written_as_before_there_was_acceleration():
    config = configuration.load(None, [*SMALL, *FEDAVG])
    assert "acceleration" not in configuration.to_toml(config)
    fast = configuration.load(None, [*SMALL, *FEDAVG, "--acceleration.memory=1"])
    assert "memory = 1" in configuration.to_toml(fast)


@slow
def test_an_accelerated_run_goes_on_and_states_what_the_plain_one_does(tmp_path, monkeypatch):
    fast = (*DRAWN, "--acceleration.memory=2", "--acceleration.damping=0.5")
    whole, cut, plain = (tmp_path / name for name in ("whole", "cut", "plain"))
    with pytest.warns(UserWarning, match="heuristic"):
        assert execute(whole, *fast)[0] == 0
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            execute(cut, *fast)
    assert execute(cut, resume=True)[0] == 0
    assert_same_run(whole, cut)
    assert execute(plain, *DRAWN)[0] == 0
    spent = [read_json(folder, "summary.json")["epsilon"] for folder in (whole, plain)]
    assert spent[0] == spent[1]
    claims = [read_json(folder, "privacy.json")["claims"] for folder in (whole, plain)]
    assert claims[0] == claims[1]
    assert any(row["is_mixed"] for row in metrics(whole)[3:])
