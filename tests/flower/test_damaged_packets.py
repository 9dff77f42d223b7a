"""Packets of a node that are damaged in any way are refused; errors of our own code are shown."""

import json
import math
import string
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from fedjax_dp.engine import Fate
from fedjax_dp.flower import agreement, exchange, grid, request
from fedjax_dp.flower.packets import Packet, arrays_of, packet_of, tree_of
from fedjax_dp.flower.plan import Shapes
from fedjax_dp.flower.testing import InProcess

TREE = {
    "bias": np.zeros(3, jnp.bfloat16),
    "count": np.int32(2),
    "kernel": np.zeros((2, 3), np.float32),
}
WITH_KEY = {**TREE, "key": jax.random.key(0)}
FACTS = {"digest": "d", "round": 1, "clients": [0, 2], "fates": [1, 1]}
quick = settings(max_examples=100, deadline=None)

FLOATS = st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, 1e38])
PLAIN = [st.integers(-(2**63), 2**64 - 1), FLOATS, st.text(), st.binary(), st.booleans()]
VALUES = st.one_of(*PLAIN, *(st.lists(each, max_size=4) for each in PLAIN))
ANY_ARRAY = of_numpy.arrays(
    st.one_of(of_numpy.scalar_dtypes(), of_numpy.unicode_string_dtypes(), of_numpy.array_dtypes()),
    of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)


def npy(version, header, content):
    """A file in NumPy's format, with any header."""
    text = header.encode("utf-8", "surrogatepass")
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + content


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(string.printable, max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=5,
)
DESCRIPTIONS = st.sampled_from(["<f4", "|O", ">f8", "|V0", "<U0", "|S3", [("a", "<f4")]])
HEADERS = st.builds(
    lambda descr, order, shape: repr({"descr": descr, "fortran_order": order, "shape": shape}),
    DESCRIPTIONS | LITERALS,
    st.booleans() | LITERALS,
    st.tuples(st.integers()) | st.just((2**31, 2**31, 2**31)) | LITERALS,
)
BYTES = st.one_of(
    st.binary(),
    st.builds(lambda content: b"PK\x03\x04" + content, st.binary()),
    st.builds(
        npy,
        st.sampled_from([b"\1\0", b"\2\0", b"\3\0", b"\4\0"]),
        HEADERS | st.text() | st.just("(" * 3000) | st.just("'"),
        st.binary(max_size=40),
    ),
)


@st.composite
def damaged(draw, tree):
    """A record of a packet, after some damages."""
    record = Packet(FACTS, arrays_of(tree, "sent")).record()
    arrays, facts = record.array_records["arrays"], record.config_records["facts"]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(arrays)) if arrays else st.just("sent/new"))
        kind = draw(st.integers(0, 6))
        if kind == 0 and name in arrays:
            content = bytearray(arrays[name].data)
            place = draw(st.integers(0, max(len(content) - 1, 0)))
            content[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
            arrays[name] = Array("", (), arrays[name].stype, bytes(content))
        elif kind == 1:
            arrays[name] = Array("", (), draw(st.text()), b"")
        elif kind == 2:
            arrays[name] = Array("", (), "numpy.ndarray", draw(BYTES))
        elif kind == 3:
            arrays[name] = Array(draw(ANY_ARRAY))
        elif kind == 4:
            arrays.pop(name, None)
        elif kind == 5:
            facts[draw(st.sampled_from(sorted(FACTS)) | st.text())] = draw(VALUES)
        else:
            place = draw(st.sampled_from(["facts", "arrays", "more"]))
            record[place] = draw(st.sampled_from([ConfigRecord, MetricRecord]))()
            break
    return record


@quick
@given(damaged(WITH_KEY))
@pytest.mark.filterwarnings("ignore:Reading `.npy`", "ignore:Stored array in format")
def test_a_damaged_record_is_read_or_a_value_error(record):
    try:
        found = tree_of(packet_of(record).arrays, "sent", WITH_KEY)
    except ValueError:
        return
    assert jax.tree.structure(found) == jax.tree.structure(WITH_KEY)


def gathered(reply):
    reader = request.Replies(Shapes(None, None, None, None, TREE), is_stacked=False)
    ids, fate = np.array([0, 2, -1]), np.array([1, 1, 0], np.int8)
    return reader.gathered({11: reply}, {11: Packet(FACTS)}, ids, fate)


@quick
@given(damaged(TREE))
@pytest.mark.filterwarnings("ignore")
def test_a_round_is_played_whatever_a_node_replies(record):
    try:
        packet = packet_of(record)
    except ValueError:
        return
    found = gathered(packet)
    allowed = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.DROPPED)
    assert set(found.fate[:2].tolist()) <= {*allowed} and found.fate[2] == Fate.EMPTY
    assert all(np.all(np.isfinite(np.asarray(x, float))) for x in jax.tree.leaves(found.total))


def answered(reply):
    """Reads the reply to a step of an agreement on masks."""
    masks = SimpleNamespace(graph=None, encoding=SimpleNamespace(max_clients=9))
    asked = {11: Packet({**FACTS, "setup": "s"})}
    part = agreement.Masking(masks, {0: 11, 2: 11}, lambda kind, packets: {11: reply})
    return part._answers("train.keys", asked, "public", (3, 32))


NAMES = ("digest", "round", "clients", "fates", "setup", "sizes", "validation sizes", "kind")
ANY_FACTS = st.dictionaries(
    st.sampled_from([*NAMES, "epsilon", "releases"]), st.lists(st.integers(0, 3)) | VALUES
)


@quick
@given(ANY_FACTS, st.dictionaries(st.sampled_from(["public", "sent"]), ANY_ARRAY))
@pytest.mark.filterwarnings("ignore")
def test_any_answer_of_a_node_is_read_or_a_value_error(facts, arrays):
    packet = Packet(facts, arrays)
    for read in (grid._claims, grid._answer):
        try:
            read(packet)
        except ValueError:
            continue
    assert answered(packet) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
REPORTS = st.fixed_dictionaries({"round": JSON, "datalink": JSON, "scores": JSON})


@quick
@given(st.text() | st.builds(json.dumps, JSON | st.lists(REPORTS | JSON)))
@pytest.mark.filterwarnings("ignore")
def test_any_text_for_scores_is_stored_or_left_out(tmp_path_factory, text):
    exchange.ScoresFile(tmp_path_factory.getbasetemp() / "scores.jsonl").append([1, 3], text)


def grid_of(facts):
    app = ClientApp()
    for kind in ("clients", "data", "privacy"):

        @app.query(kind)
        def reply(message, context):
            return Message(Packet(facts).record(), reply_to=message)

    return InProcess(app, {11: {}})


def claims():
    reached = grid.GridNodes(grid_of({"clients": [0], "sizes": [4]}), sizes=[4])
    reached.clients(Packet())
    return reached.claims(0.1)


def report(folder):
    exchange.ScoresFile(folder / "scores.jsonl").append([1], "[{}]")


PLACES = {
    "a reply to a question": (grid, "packet_of", lambda _: claims()),
    "a claim": (grid, "_claims", lambda _: claims()),
    "a registration": (grid, "_answer", lambda _: grid.registered(grid_of({}), 1)),
    "a step under masks": (agreement, "require_echo", lambda _: answered(Packet())),
    "a reply of a round": (request, "tree_of", lambda _: gathered(Packet(FACTS))),
    "a report of scores": (exchange, "_report", report),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_our_own_code_is_not_taken_for_a_lost_reply(place, monkeypatch, tmp_path):
    module, name, read = PLACES[place]
    monkeypatch.setattr(module, name, None)
    with pytest.raises((TypeError, AttributeError), match="None"):
        read(tmp_path)
