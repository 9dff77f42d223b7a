"""`fedjax-dp measure`: a file of speeds that automatic choices follow, continued if interrupted."""

import json

import pytest

from fedjax_dp.core.backend import Facts
from fedjax_dp.core.choices import choices
from fedjax_dp.experiment.studies import measuring
from fedjax_dp.io import read_measured

CARD = Facts("gpu", "NVIDIA H100 80GB HBM3", "9.0", 132)
RATES = {"native": 100.0, "products": 200.0, "records": 50.0}


def row(form, precision, count):
    if count == 1024:
        return {"form": form, "precision": precision, "clients": count, "error": "no memory"}
    rate = RATES[form] * (2 if precision == "split" else 1)
    found = {"form": form, "precision": precision, "clients": count, "seconds": count / rate}
    return found | {"clients_per_second": rate, "gflops": rate / 5}


@pytest.fixture
def asked(monkeypatch):
    """A machine that is made to look like a GPU, and the forms that were timed on it."""
    found = []

    def speeds(form, precisions, counts):
        found.append((form, *precisions))
        for precision in precisions:
            yield from (row(form, precision, count) for count in counts)

    for module in ("fedjax_dp.cli.measure", "fedjax_dp.experiment.studies.measuring"):
        monkeypatch.setattr(f"{module}.facts", lambda: CARD)
    monkeypatch.setattr(measuring, "backend", lambda: "gpu")
    monkeypatch.setattr(measuring, "machine", lambda: {"device": CARD.device, "jax": "1"})
    monkeypatch.setattr(measuring, "speeds", speeds)
    return found


ALL = [("native", "default"), ("products", "float32", "default"), ("records", "float32", "split")]


def test_speeds_are_measured_and_followed(fedjax_dp, tmp_path, asked):
    path = tmp_path / "new" / "speeds.json"
    status, output, errors = fedjax_dp("measure", "--output", path)
    assert status == 0, errors
    assert asked == ALL
    assert "convolutions\tnative\tproducts" in output and "products\texact\tsplit" in output
    assert "native steps, 1 of 3: compiling 6 programs" in errors
    assert "1024 clients side by side: no memory" in errors
    chosen = choices(CARD, read_measured(path))
    assert (chosen.convolutions, chosen.products) == ("products", "split")
    # Nothing is left to measure, until it is asked for.
    document = json.loads(fedjax_dp("measure", "--output", path, "--json")[1])
    assert asked == ALL and document["choices"]["products"] == {"before": "exact", "now": "split"}
    assert set(document) == {"version", "command", "status", "file", "device", "choices"}
    fedjax_dp("measure", "--output", path, "--again", "--quiet")
    assert asked == 2 * ALL


def test_an_interrupted_call_continues_with_the_form_that_it_was_at(
    fedjax_dp, tmp_path, asked, monkeypatch
):
    whole = measuring.speeds

    def interrupted(form, precisions, counts):
        if form == "products":
            raise KeyboardInterrupt
        yield from whole(form, precisions, counts)

    path = tmp_path / "speeds.json"
    monkeypatch.setattr(measuring, "speeds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(path, lambda text: None)
    assert asked == ALL[:1]
    monkeypatch.setattr(measuring, "speeds", whole)
    assert fedjax_dp("measure", "--output", path)[0] == 0
    assert asked == ALL


def test_what_cannot_be_measured_or_continued_is_refused(fedjax_dp, tmp_path, asked, monkeypatch):
    path = tmp_path / "speeds.json"
    path.write_text("{}", encoding="utf-8")
    status, _, errors = fedjax_dp("measure", "--output", path)
    assert status == 2 and "output must be a new file, or one of measured speeds" in errors
    other = {"machine": {"device": "A100", "jax": "1"}, "steps": {"native steps": {}}}
    path.write_text(json.dumps(other), encoding="utf-8")
    status, _, errors = fedjax_dp("measure", "--output", path)
    assert status == 2 and "results of another machine (other device)" in errors
    monkeypatch.setattr(measuring, "backend", lambda: "cpu")
    status, _, errors = fedjax_dp("measure", "--output", tmp_path / "none.json")
    assert status == 2 and "measure must run on a GPU or TPU" in errors
    assert not asked and not (tmp_path / "none.json").exists()
