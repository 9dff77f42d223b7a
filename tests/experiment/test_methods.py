"""The table of methods: every algorithm has a source, and the facts of its declaration."""

import inspect

import pytest

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.experiment import methods, methods_table
from fedjax_dp.experiment.studies.methods import _of_clients, _source


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_names_its_source(name):
    text = " ".join(inspect.getdoc(ALGORITHMS[name].factory).split())
    assert len(_source(text)) > 15 and "\n" not in _source(text)


def test_facts_of_methods_are_those_of_their_papers():
    scaffold, ifca = methods(["scaffold", "ifca"])
    # Karimireddy and others 2020, algorithm 1: x and c down, their changes up, c_i kept.
    assert (scaffold.kept, scaffold.down, scaffold.up) == ("1 model", "2 models", "2 models")
    assert scaffold.units == ("record", "client", "both") and "record" in scaffold.covered
    assert scaffold.clients == "yes, params and control as one vector"
    # Ghosh and others 2020, algorithm 1: all models down, one of them up, with choice and weight.
    assert (ifca.down, ifca.up) == ("2 models", "1 model and 8 bytes")
    assert ifca.units == ("client",) and ifca.covered == {"client": "all models of the server"}
    assert "--algorithm.options.num_models=2" in ifca.command
    twin = scaffold._replace(name="twin")
    tables = [part.splitlines() for part in methods_table([scaffold, ifca, twin]).split("\n\n")]
    assert [len(lines) for lines in tables] == [5, 4, 5]
    assert [{line.count(" | ") for line in lines} for lines in tables] == [{4}, {2}, {2}]
    # Methods that protect the same share a row.
    assert tables[1][2].startswith(
        "| `scaffold`, `twin` | record or client: the shared model | yes"
    )
    assert "Karimireddy and others 2020 (SCAFFOLD), algorithm 1" in tables[2][2]


def test_every_method_protects_clients_or_says_why_not():
    for name, entry in ALGORITHMS.items():
        assert bool({"client", "both"} & {*entry.units}) != bool(entry.no_clients), name
    said = {
        name: _of_clients(ALGORITHMS[name], {}) for name in ("km_cdpfl", "local_only", "dp_sgd")
    }
    assert said == {
        "km_cdpfl": "no: its server computes on the updates of single clients",
        "local_only": "no: it sends nothing",
        "dp_sgd": "yes, with records",
    }


def test_a_method_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="names must be one of"):
        methods(["fedavgg"])
