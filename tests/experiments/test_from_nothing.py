"""The timed start of a federation runs the commands of the page, here with empty programs."""

import json

import pytest

from experiments.deployment import from_nothing
from fedjax_dp.experiment.reading.config_files import from_toml

PROGRAM = """#!/bin/bash
printf '%s\\n' "$(basename $0)" "$@" > "$HOME/$(basename $0)"
printf '%s\\n' "$HOME" "$FLWR_HOME" "$FEDJAX_DP_DATA" > "$HOME/variables-of-$(basename $0)"
"""
# A round ends once the server and three nodes have started.
STARTED = '$(ls "$HOME"/../*/variables-of-flower-* | wc -l) = 4'
ROUND = f"until [ {STARTED} ]; do sleep 0.1; done; mkdir hospitals-run\n"
ROUND += f"echo '{json.dumps({'nodes_replied': 3})}' > hospitals-run/metrics.jsonl; sleep 60\n"


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """A folder in which programs that write down how they were called are installed."""
    asked = []

    def install(folder, extras):
        asked.append((folder.name, extras))
        (programs := folder / "env" / "bin").mkdir(parents=True)
        for name in ("fedjax-dp", "flower-superlink", "flower-supernode", "flwr"):
            (programs / name).write_text(PROGRAM + (ROUND if name == "flwr" else ""))
            (programs / name).chmod(0o755)

    answers = iter((False, True))
    monkeypatch.setattr(from_nothing, "install", install)
    monkeypatch.setattr(from_nothing, "is_listening", lambda: next(answers))
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    return tmp_path / "trial", asked


def test_the_commands_are_those_of_the_page(machines):
    folder, asked = machines
    found = from_nothing.from_nothing(folder)
    work = folder / "work"
    assert asked == [(name, "[cli,flower,table,plots]") for name in found["commands"]]
    assert found["commands"] == {"server": 3, "east": 1, "north": 1, "west": 1}

    def called(name, program):
        return (folder / name / program).read_text().splitlines()

    export = ["export", "flower", "hospitals.toml", "app", "--output", f"{work}/hospitals-run"]
    assert called("server", "fedjax-dp") == ["fedjax-dp", *export]
    link = ["--insecure", "--disable-runtime-dependency-installation"]
    assert called("server", "flower-superlink") == ["flower-superlink", *link]
    variables = [str(folder / "server"), "", str(work)]
    assert called("server", "variables-of-flower-superlink") == variables
    start = ["run", "app", "--stream", "--run-config", "own-data=true"]
    assert called("server", "flwr") == ["flwr", *start]
    assert called("server", "variables-of-flwr")[1] == f"{work}/app/.flwr"
    for i, name in enumerate(("east", "north", "west")):
        table, states = work / "hospitals" / f"{name}.csv", work / f"states-{i}"
        assert table.is_file()
        node = ["--insecure", "--superlink", "127.0.0.1:8000", "--port", f"{9094 + i}"]
        node += ["--node-config", f'clients="{i}" data="{table}" state-dir="{states}"']
        assert called(name, "flower-supernode") == ["flower-supernode", *node]
    config = from_toml((work / "hospitals.toml").read_text(), "hospitals.toml")
    assert (config.data.num_clients, config.privacy.units) == (3, ("record",))


def test_a_round_without_a_node_is_no_federation(machines, monkeypatch):
    monkeypatch.setitem(globals(), "ROUND", ROUND.replace("3", "2", 1))
    with pytest.raises(RuntimeError, match="2 of 3 nodes took part in round 1"):
        from_nothing.from_nothing(machines[0])


def test_every_command_stands_on_the_page():
    page = from_nothing.PAGE.read_text("utf-8")
    for command in from_nothing.commands_of(page):
        assert command in page
    with pytest.raises(ValueError, match="one line"):
        from_nothing.commands_of(page.replace("flwr run app", "flwr start app"))


def test_a_port_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(from_nothing, "is_listening", lambda: True)
    with pytest.raises(ValueError, match="port 8000 must be free"):
        from_nothing.from_nothing(tmp_path)
