"""Shared by all tests: where real data files are, and skipping what needs them.

The quick suite spends its time in compiling small programs that run once, so it asks XLA for the
least optimisation. The slow tests, the benchmarks and all commands run what users run.
"""

import os
import pathlib

import pytest

_COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def pytest_configure(config: pytest.Config) -> None:
    """Before JAX starts, here and in the processes that tests start."""
    if config.option.markexpr == "not slow":
        given = os.environ.get("XLA_FLAGS", "").split()
        missing = [flag for flag in _COMPILE_QUICKLY if flag not in given]
        os.environ["XLA_FLAGS"] = " ".join(given + missing)


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of one algorithm together, which share what they compile.

    Of use with several processes and `--dist loadgroup`, which reads the groups after this.
    """
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if name and item.path.parent.name in ("algorithms", "engine"):
            item.add_marker(pytest.mark.xdist_group(f"algorithm {name}"))
