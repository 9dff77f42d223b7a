"""Error replies of nodes: rule and column leave a node; cells, rows, counts and paths stay."""

import re

import numpy as np
import pytest
from flwr.app import Message
from test_own_data import TOML, grid_of

from fedjax_dp.core.disclosure import GuardedError, in_public, public_text
from fedjax_dp.data import FederatedData
from fedjax_dp.flower import client_app
from fedjax_dp.flower.node import DATA
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.testing import InProcess

pa = pytest.importorskip("pyarrow")
SECRET = "Xaver Hinterhuber"
HEAD = "age,pressure,ill"
ROWS = [f"{20 + i},{100 + i},{'yes' if i % 2 else 'no'}" for i in range(37)]


def csv(*lines, head=HEAD, rows=ROWS):
    return "\n".join([head, *rows, *lines, ""]).encode()


def categorical(text):
    return text.replace('ill = ["no"', 'age = ["20", "21"], ill = ["no"')


def dated(text):
    since = 'dates = { age = { since = "2020-01-01", format = "%Y-%m-%d" } }\n'
    return text.replace("ranges =", since + "ranges =").replace("age = [0, 110], ", "")


# The file of a node, what changes in the experiment, and the column and rule of the reply.
FAILURES = {
    "a cell outside of the categories": (csv(f"30,99,{SECRET}"), None, "'ill'.* one of no, yes"),
    "a cell for a number": (csv(f"30,{SECRET},no"), None, "'pressure'.* hold numbers or strings"),
    "cells that are missing": (csv("30,,no", "31,,no"), None, "'pressure'.* have a value in every"),
    "a label that is missing": (csv("30,90,"), None, "'ill'.* have a value in every row"),
    "a number that float32 lacks": (csv("30,4711e99,no"), None, "'pressure'.* finite numbers"),
    "an identifier": (csv("30,90071992547409931,no"), None, "'pressure'.* integers below 2"),
    "a category of a feature": (csv(f"{SECRET},90,no"), categorical, "'age'.* one of 20, 21"),
    "a date": (csv(f"{SECRET},90,no"), dated, "'age'.* be a date written as"),
    "a row of another length": (csv(f"30,{SECRET}"), None, "cells are separated by ','"),
    "no header": (csv(head=f"30,{SECRET},no"), None, "must name columns .* 'ill' is none"),
    "a column twice": (csv(head="age,pressure,ill,ill"), None, "cells are separated by ','"),
    "no rows": (csv(rows=[]), None, "must hold rows"),
    "an open quote": (csv(f'30,"{SECRET},no'), None, "close each quote"),
    "another encoding": (
        csv() + f"30,{SECRET}é,no".encode("latin-1"),
        None,
        "text in its encoding",
    ),
    "another separator": (csv().replace(b",", b";"), None, "must be separated by"),
    "a damaged archive": (SECRET.encode(), "x.csv.gz", "cells are separated"),
    "a damaged table": (SECRET.encode(), "x.parquet", "be a Parquet file"),
    "another format": (SECRET.encode(), "x.xlsx", "have one of the suffixes"),
    "no file": (None, None, "must be a file"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_no_part_of_a_record_leaves_its_node(failure, tmp_path, caplog):
    content, change, expected = FAILURES[failure]
    folder = tmp_path / f"{SECRET} 4711"
    folder.mkdir()
    name, text = change if isinstance(change, str) else "x.csv", TOML.format(folder="/nowhere")
    (folder / "experiment.toml").write_text(change(text) if callable(change) else text)
    file = folder / name
    if content is not None:
        file.write_bytes(content)
    grid = grid_of(folder, "experiment.toml", {0: file})
    (reply,) = grid.send_and_receive([Message(Packet().record(), 7, DATA)])
    said = reply.error.reason.replace("\\'", "'")
    assert re.search(expected, said), said
    said = re.sub("e[-+][0-9]+", "", said)
    for part in (*SECRET.split(), "4711", str(tmp_path), "x.csv", "37", "38", "39"):
        assert part not in said, part
    assert not re.search("(row|line) [0-9]", said)
    # Its owner reads all of it.
    assert str(file) in caplog.text


def failing(error):
    """The reply of a node whose data fail by an error."""

    def data(context):
        raise error

    app = client_app(lambda node, population: None, data)
    (reply,) = InProcess(app, {7: {}}).send_and_receive([Message(Packet().record(), 7, DATA)])
    return reply.error.reason


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, RuntimeError, UnicodeError])
def test_of_an_error_that_is_not_known_its_kind_alone_leaves_a_node(kind, caplog):
    error = kind(f"row 3 holds {SECRET}")
    error.add_note(SECRET)
    assert failing(error).startswith(f"RefusedError('{kind.__name__}: the log")
    assert SECRET in caplog.text


def test_records_that_are_not_finite_are_counted_in_the_log_of_their_node_alone():
    examples = {"x": np.array([[1.0], [np.nan], [np.inf]], np.float32)}
    with pytest.raises(
        ValueError, match=r"got NaN or infinity in 2 rows, .* row 1 \(client 0"
    ) as e:
        FederatedData(examples, np.array([0, 3])).check_finite()
    assert public_text(e.value).startswith("examples['x'] must be finite; the log")


def test_the_public_part_of_an_error_outlasts_what_it_is_wrapped_in():
    try:
        try:
            raise GuardedError(f"{SECRET} must be a number", "a cell must be a number")
        except ValueError as error:
            raise TypeError(SECRET) from error
    except TypeError as error:
        assert public_text(error).startswith("a cell must be a number;")
    with pytest.raises(GuardedError) as found, in_public():
        raise GuardedError(SECRET, "a cell")
    assert found.value.public == "a cell"
    # What was raised without a public part has none, also where all else is public.
    with pytest.raises(GuardedError) as found, in_public():
        raise GuardedError(SECRET)
    assert public_text(found.value).startswith("GuardedError:")


def test_a_node_keeps_its_folders_to_itself(tmp_path):
    for name in ("data", "state-dir", "experiment"):
        app = InProcess(grid_of(tmp_path)._app, {7: {"clients": "0", name: f"{SECRET}/x"}})
        (reply,) = app.send_and_receive([Message(Packet().record(), 7, DATA)])
        assert f"node-config {name} must be an absolute path" in reply.error.reason
        assert SECRET not in reply.error.reason


WRONG = {
    "an unknown name": ({SECRET: 1}, "a name in node-config must be one of clients, data, "),
    "an unknown choice": ({"keys": SECRET}, "node-config keys must be one of device, parity"),
    "a list of another form": ({"clients": SECRET}, "node-config clients must be numbers and"),
    "no clients": ({}, "node-config must hold clients, or partition-id and num-partitions"),
    "both forms": ({"partition-id": 0, "clients": SECRET}, "node-config must hold clients, or"),
    "another number": ({"partition-id": SECRET, "num-partitions": 2}, "must be a whole number"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_node_whose_configuration_is_wrong_says_which_name(wrong, tmp_path):
    (tmp_path / "deployed.toml").write_text(TOML.format(folder="/nowhere"))
    (file := tmp_path / f"{SECRET}.csv").write_bytes(csv())
    config, expected = WRONG[wrong]
    grid = InProcess(grid_of(tmp_path)._app, {7: {"data": str(file), **config}})
    (reply,) = grid.send_and_receive([Message(Packet().record(), 7, DATA)])
    assert expected in reply.error.reason and SECRET not in reply.error.reason
