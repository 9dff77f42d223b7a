"""The command answers at once: what it does not need is not imported."""

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
from marks import slow
from typer.main import get_command

from fedjax_dp.cli import main
from fedjax_dp.core.packages import installer, libraries
from fedjax_dp.experiment import WorkerError

SLOW = ("jax", "numpy", "scipy", "sklearn", "flax", "optax", "dp_accounting", "matplotlib")


def imported_by(code):
    """What a fresh process has imported once it has run some code, and what it printed."""
    tail = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    program = f"{code}\n{tail}"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    *printed, modules = ended.stdout.splitlines()
    return "\n".join(printed), set(json.loads(modules))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import fedjax_dp", ""),
        # `run` prints its first line before it imports the rest.
        (
            "from fedjax_dp.cli.main import app, command; command('run'); "
            "app(['--help'], standalone_mode=False)",
            "bench",
        ),
        ("from fedjax_dp.cli.main import app; app(['--version'], standalone_mode=False)", "jaxlib"),
    ],
)
def test_nothing_large_is_imported_for_few_words(code, said):
    printed, modules = imported_by(code)
    assert said in printed and not modules & set(SLOW)


@slow
def test_importing_a_name_imports_no_other_room():
    _, modules = imported_by("import fedjax_dp; fedjax_dp.Model")
    assert "fedjax_dp.models" in modules
    assert not modules & {"fedjax_dp.engine", "flax.nnx"}
    _, modules = imported_by("import fedjax_dp; fedjax_dp.fedavg")
    assert "jax" in modules and not modules & {"sklearn", "matplotlib", "orbax"}


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_placeholder_of_a_command_has_its_help(name):
    listed = get_command(main.app).commands[name].help
    own = main.command(name).help
    assert listed == own.splitlines()[0]


def test_versions_are_those_that_are_installed():
    found = libraries()
    assert next(iter(found)) == "fedjax-dp" and {"jax", "jaxlib", "dp-accounting"} <= found.keys()
    assert not {"pytest", "ruff", "mypy", "mkdocs-material"} & found.keys()


@pytest.mark.parametrize("words", [("--version", "--json"), ("--json", "--version")])
def test_versions_may_be_asked_for_as_a_document(fedjax_dp, words):
    status, printed, said = fedjax_dp(*words)
    document = json.loads(printed)
    assert status == document["status"] == 0 and not said
    assert document["libraries"] == libraries()


def test_a_document_may_be_asked_for_before_the_command(fedjax_dp):
    words = ("privacy", "epsilon", "--noise-multiplier", "1", "--steps", "1", "--delta", "1e-5")
    behind, before = fedjax_dp(*words, "--json"), fedjax_dp("--json", *words)
    assert behind == before and json.loads(before[1])["command"] == "privacy epsilon"
    assert fedjax_dp("--json", *words, "--json") == behind
    assert json.loads(fedjax_dp("--json", "rnu")[1])["status"] == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.28 TiB for an array"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
        WorkerError("a worker failed: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
    ],
)
def test_out_of_memory_names_what_to_change(monkeypatch, capsys, error):
    def fails(**options):
        raise error

    monkeypatch.setattr(main, "app", fails)
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: out of memory: ")
    assert str(error) in said and "execution.clients_per_chunk" in said


def test_the_error_of_a_worker_has_no_traceback_of_this_process(monkeypatch, capsys):
    monkeypatch.setattr(main, "app", Mock(side_effect=WorkerError("3 workers in a row died")))
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: 3 workers in a row died\n")


def test_a_package_that_is_missing_is_named_in_one_line(fedjax_dp, monkeypatch, tmp_path):
    (tmp_path / "t.csv").write_text("a,ill\n1,x\n2,y\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ("run", "--data.name=table", "--data.options.path=t.csv", "--data.options.label=ill")
    line = (
        "reading t.csv needs the package pyarrow, which is not installed: "
        f'{installer()} "fedjax-dp[table]"'
    )
    status, printed, said = fedjax_dp(*words)
    assert (status, printed, said.splitlines()[-1]) == (2, "", f"error: {line}")
    status, printed, said = fedjax_dp(*words, "--json")
    document = json.loads(printed)
    assert status == document["status"] == 2 and document["error"] == line
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv"}


def test_what_is_no_mistake_of_the_users_is_not_hidden(monkeypatch):
    def fails(**options):
        raise error

    monkeypatch.setattr(main, "app", fails)
    for error in (RuntimeError("a fault of ours"), ImportError("a fault of ours")):
        with pytest.raises(type(error), match="a fault of ours"):
            main.main()
