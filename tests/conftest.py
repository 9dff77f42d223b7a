"""Shared by all tests: how they compile, where real data files are, and skipping what needs them.

Compiling is half of the time of a suite. Tests on CPUs therefore ask XLA for the kernels that
compile fastest; `pytest --optimized` gives them those that users get. A program that one process
of a run has compiled is read by the others from a folder of that run.
"""

import gc
import os
import pathlib
import shutil
import sys
import tempfile

import pytest
from starting import known_flags, show_last_words

# Together they take a third of the time to compile: kernels without LLVM's optimisations, fusions
# without a dialect of their own, modules in one piece.
_FAST_TO_COMPILE = (
    "xla_backend_optimization_level=0",
    "xla_cpu_use_fusion_emitters=false",
    "xla_cpu_parallel_codegen_split_count=1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    explained = "compile with all of XLA's optimisations, as users do"
    parser.addoption("--optimized", action="store_true", help=explained)


def pytest_configure(config: pytest.Config) -> None:
    """Before JAX starts; workers and the processes that tests start inherit what is set."""
    show_last_words(config)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    given = os.environ.get("XLA_FLAGS", "")
    flags = known_flags(() if config.getoption("--optimized") else _FAST_TO_COMPILE, given)
    os.environ["XLA_FLAGS"] = " --".join([given, *flags]).strip()
    folder = tempfile.mkdtemp(prefix="compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ.update(
        JAX_COMPILATION_CACHE_DIR=folder,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )


def pytest_sessionstart() -> None:
    """What is imported and collected stays; to look through it for garbage takes time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    # As `fedjax-dp` does: tracing makes many objects, and little cyclic garbage.
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


# Linux gives a process 65,530 mapped pieces of memory, and each compiled program takes some.
_MOST_MAPS = 30_000


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, drops the programs of a process that has compiled thousands."""
    maps = pathlib.Path("/proc/self/maps")
    if nextitem is None or nextitem.path == item.path or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        own = [m for m in list(sys.modules.values()) if _is_below(m, item.config.rootpath)]
        for shared in (value for module in own for value in vars(module).values()):
            if hasattr(shared, "cache_clear"):
                shared.cache_clear()
        jax.clear_caches()
        gc.collect()


def _is_below(module: object, root: pathlib.Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(root / "tests"))


def _data_dir() -> pathlib.Path:
    named = os.environ.get("FEDJAX_DP_DATA")
    repository = pathlib.Path(__file__).resolve().parents[1]
    return pathlib.Path(named) if named else repository.parent / "shared" / "data"


@pytest.fixture(scope="session")
def data_folder() -> pathlib.Path:
    """Where real data would be."""
    return _data_dir()


@pytest.fixture(scope="session")
def data_dir(data_folder: pathlib.Path) -> pathlib.Path:
    folder = data_folder
    if not folder.is_dir():
        pytest.skip(f"no folder of real data at {folder}")
    return folder


@pytest.fixture
def fedjax_dp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Gives the command in this process: `(words) -> (status, output, errors)`."""
    from fedjax_dp.cli import main

    def invoke(*words):
        monkeypatch.setattr("sys.argv", ["fedjax-dp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return invoke


def pytest_runtest_setup(item: pytest.Item) -> None:
    from fedjax_dp.data import datasets

    for mark in item.iter_markers("needs_data"):
        for name in mark.args:
            if not datasets.status(name, _data_dir()).is_present:
                pytest.skip(f"the files of {name} are not in {_data_dir()}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks telling tests as slow, and groups tests of one algorithm, or of one file, by process.

    A case of a telling test that is marked as slow itself is left to the slow suite.
    """
    for item in items:
        if item.get_closest_marker("slow"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "telling"]
        elif item.get_closest_marker("telling"):
            item.add_marker(pytest.mark.slow)
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        shares = item.path.parent.name in ("algorithms", "audit", "engine")
        # What a file computes once is then computed by one process; slow tests would leave the
        # others without work.
        is_quick = not item.get_closest_marker("slow")
        if (shares or is_quick) and not item.get_closest_marker("xdist_group"):
            group = f"algorithm {name}" if shares and name else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
