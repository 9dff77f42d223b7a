"""Measured speeds are read from the files of `fedjax-dp measure` and of the benchmark."""

import json

import pytest

from benchmarks.accelerator import page as pages
from benchmarks.accelerator.runner import Book, Step
from fedjax_dp.core.backend import Facts
from fedjax_dp.core.choices import Speed, choices
from fedjax_dp.io import read_measured

MACHINE = {"device": "NVIDIA H100 80GB HBM3", "backend": "gpu", "jax": "1"}


def row(form, precision, clients, rate, operations=2e8):
    seconds = clients / rate
    return {
        "form": form,
        "precision": precision,
        "clients": clients,
        "seconds": seconds,
        "clients_per_second": rate,
        "gflops": operations * clients / seconds / 1e9,
    }


def written(folder, steps):
    """A file as the benchmark writes it."""
    book = Book(folder / "accelerator-gpu.json", MACHINE, pages.page)
    for name, group, status, rows in steps:
        found = {"status": status, "error": "", "seconds": 1.0, "rows": rows}
        book.add(Step(name, group, (), 1.0, 2.0), found)
    book.write_all([])
    return folder / "accelerator-gpu.json"


def test_speeds_are_those_of_layouts_that_were_measured_whole(tmp_path):
    path = written(
        tmp_path,
        [
            ("records float32", "layouts", "done", [row("records", "float32", 4, 80.0)]),
            ("records split", "layouts", "done", [row("records", "split", 4, 200.0)]),
            ("native default", "layouts", "cut off", [row("native", "default", 4, 9.0)]),
            ("peaks", "peaks", "done", [{"what": "copy", "gb_per_second": 1.0}]),
        ],
    )
    found = read_measured(path)
    assert found.device == MACHINE["device"]
    assert [s[:4] for s in found.speeds] == [
        ("records", "float32", 4, 80.0),
        ("records", "split", 4, 200.0),
    ]
    assert all(s.operations == pytest.approx(2e8) for s in found.speeds)
    assert isinstance(found.speeds[0], Speed)
    assert choices(Facts("gpu", found.device, "9.0"), found).products == "split"


@pytest.mark.parametrize(
    "content",
    [{}, [], {"machine": {"device": "x"}}, {"machine": {"device": "x"}, "steps": {"a": {}}}],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"measured must be a file that `fedjax-dp measure` wrote"):
        read_measured(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "damaged.json"
    path.write_text("{")
    with pytest.raises(
        ValueError, match=r"^measured must be a file that `fedjax-dp measure` wrote"
    ):
        read_measured(path)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="be a file that `fedjax-dp measure` wrote"):
        read_measured(tmp_path / "none.json")
