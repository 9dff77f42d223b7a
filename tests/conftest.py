"""Shared by all tests: where real data files are, and skipping what needs them."""

import os
import pathlib

import pytest


def _data_dir() -> pathlib.Path:
    named = os.environ.get("FEDJAX_DP_DATA")
    repository = pathlib.Path(__file__).resolve().parents[1]
    return pathlib.Path(named) if named else repository.parent / "shared" / "data"


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    folder = _data_dir()
    if not folder.is_dir():
        pytest.skip(f"no folder of real data at {folder}")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    from fedjax_dp.data import datasets

    for mark in item.iter_markers("needs_data"):
        for name in mark.args:
            if not datasets.status(name, _data_dir()).is_present:
                pytest.skip(f"the files of {name} are not in {_data_dir()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of one algorithm together, which share what they compile.

    Of use with several processes and `--dist loadgroup`.
    """
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if name and item.path.parent.name in ("algorithms", "engine"):
            item.add_marker(pytest.mark.xdist_group(f"algorithm {name}"))
