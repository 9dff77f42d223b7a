"""The privacy statement on disk agrees with the ledgers that it is read off."""

import json

import dp_accounting
import numpy as np
import pytest

from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.io.statement import write_statement
from fedjax_dp.privacy.accounting.ledger import Ledger

DELTA = {"client": 1e-6, "record": 1e-5}
FACTS = {"client": {"clip_norm": 0.5}, "record": {"clip_norm_per_unit": np.array([1.0, 2.0, 3.0])}}


@pytest.fixture
def ledgers():
    client, record = Ledger("client"), Ledger("record", num_units=3)
    client.charge(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), count=7
    )
    record.charge(dp_accounting.GaussianDpEvent(4.0), units=[0, 2], count=[3, 5])
    return {"client": client, "record": record}


def test_nothing_is_claimed_where_nothing_is_kept(tmp_path):
    write_statement(tmp_path, {}, {}, "rdp", {})
    assert json.loads((tmp_path / "privacy.json").read_text()) == {"claims": []}
    assert "claims no privacy" in (tmp_path / "privacy.md").read_text()


def test_every_unit_has_its_claim(tmp_path, ledgers):
    write_statement(tmp_path, ledgers, DELTA, "rdp", FACTS)
    client, record = json.loads((tmp_path / "privacy.json").read_text())["claims"]
    for claim in (client, record):
        ledger = ledgers[claim["unit"]]
        spent = ledger.epsilon(DELTA[claim["unit"]])
        assert claim["epsilon_per_unit"] == spent.tolist()
        assert claim["epsilon"] == spent.max()
        assert claim["num_compositions"] == ledger.num_compositions.tolist()
        assert claim["dp_delta"] == DELTA[claim["unit"]]
    assert client["clip_norm"] == 0.5 and record["clip_norm_per_unit"] == [1.0, 2.0, 3.0]
    text = (tmp_path / "privacy.md").read_text()
    assert text.index("## Client level") < text.index("## Record level")
    spent = ledgers["record"].epsilon(1e-5)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        f"| {i} | {rounded_up(spent[i], 5)} | {n} | {i + 1} |" for i, n in enumerate((3, 0, 5))
    ]
    assert spent[1] == 0.0 < spent[0] < spent[2]


def test_units_that_chose_their_own_delta_have_it_in_their_row(tmp_path, ledgers):
    deltas = [1e-3, 1e-4, 1e-6]
    write_statement(tmp_path, ledgers, DELTA | {"record": deltas}, "rdp", FACTS)
    client, record = json.loads((tmp_path / "privacy.json").read_text())["claims"]
    assert client["dp_delta_per_unit"] == [DELTA["client"]]
    assert record["dp_delta_per_unit"] == deltas
    spent = [ledgers["record"].epsilon(delta)[i] for i, delta in enumerate(deltas)]
    rows = [row for row in (tmp_path / "privacy.md").read_text().splitlines() if row[:2] == "| "]
    assert rows[0] == "| client | ε | releases | δ | clip norm |"
    assert rows[1:] == [
        f"| {i} | {rounded_up(spent[i], 5)} | {n} | {delta:g} | {i + 1} |"
        for i, (n, delta) in enumerate(zip((3, 0, 5), deltas, strict=True))
    ]


def test_clients_that_have_names_are_named(tmp_path, ledgers):
    names = {"client_names": ["Ward|A", "B", "C"]}
    write_statement(tmp_path, ledgers, DELTA, "rdp", {u: f | names for u, f in FACTS.items()})
    rows = [row for row in (tmp_path / "privacy.md").read_text().splitlines() if row[:2] == "| "]
    assert [row.split(" | ")[0] for row in rows] == ["| client", r"| Ward\|A", "| B", "| C"]
    assert read_claims(tmp_path)[1]["client_names"] == names["client_names"]


def test_a_name_adds_no_row_and_no_heading_and_controls_no_terminal(tmp_path, ledgers):
    hostile = ["North\n\n## Client level\n", "a | 0 |\r\n| all | 0.01 |", "\x1b[2J\x1b]0;x\x07"]
    facts = {u: f | {"client_names": hostile} for u, f in FACTS.items()}
    write_statement(tmp_path, ledgers, DELTA, "rdp", facts, {"a | b`\n.txt": "exact"})
    text = (tmp_path / "privacy.md").read_bytes().decode()
    assert not [c for c in text if ord(c) < 32 and c != "\n"]
    rows = [row for row in text.splitlines() if row[:2] == "| "]
    # Heads, a row for each client, heads, and a row for the file.
    assert len(rows) == 6 and all(row.count(" | ") == rows[0].count(" | ") for row in rows[:4])
    assert text.count("\n## Client level") == 1
    assert read_claims(tmp_path)[1]["client_names"] == hostile


def read_claims(folder):
    return json.loads((folder / "privacy.json").read_text())["claims"]


def test_an_infinite_epsilon_is_written(tmp_path):
    record = Ledger("record", num_units=2)
    record.charge(dp_accounting.GaussianDpEvent(0.0), units=[1])
    write_statement(tmp_path, {"record": record}, DELTA, "rdp", {"record": {"clip_norm": 1.0}})
    claim = json.loads((tmp_path / "privacy.json").read_text())["claims"][0]
    assert claim["epsilon"] == "inf" and claim["epsilon_per_unit"] == [0.0, "inf"]
    text = (tmp_path / "privacy.md").read_text()
    assert "not differentially private" in text and "| 1 | inf | 1 |" in text


def test_a_statement_has_what_a_paper_needs(tmp_path, ledgers):
    common = {"seed": 3, "versions": {"jax": "0.9"}, "also_not_private": ["when it ended"]}
    facts = {
        "client": FACTS["client"] | common,
        "record": FACTS["record"] | common | {"batch_size_per_unit": np.array([8.0, 8.0, 16.0])},
    }
    write_statement(tmp_path, ledgers, DELTA, "rdp", facts)
    of_clients, of_records = (tmp_path / "privacy.md").read_text().split("## Record level")
    assert "at a rate of 0.1. " in of_clients and "at a rate" not in of_records
    assert "The bound on one contribution is 0.5." in of_clients
    assert "The bound on one contribution is 1 to 3. A step reads 8 to 16 records." in of_records
    for text in (of_clients, of_records):
        assert "Computed with seed 3, jax 0.9." in text and "when it ended." in text
    assert "| client | ε | releases | clip norm | batch |" in of_records
