"""What all commands share: JSON, quiet, log levels, progress, pipes, help, completion."""

import errno
import functools
import io
import json
import logging
import os
import pathlib
import re
import runpy
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from marks import slow
from rich.console import Console

from fedjax_dp.cli import main, progress
from fedjax_dp.cli.output import LogLevel, Output, logging_at
from fedjax_dp.experiment.reading import keys
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.running.run import Outcome
from fedjax_dp.io import plots
from fedjax_dp.io.digests import DiskFull
from fedjax_dp.models.losses import Loss

PRIVACY = ("--noise-multiplier", "1", "--sampling-rate", "0.1", "--steps", "5", "--delta", "1e-5")
UNCOVERED = "what is chosen by the loss of records that lie with several of the clients"
SUMMARY = {
    "rounds": 3,
    "seconds": 1.5,
    "seconds_rounds": 1.0,
    "test_accuracy": 0.5,
    "test_accuracy_of": "the shared model",
    "covered_models": "the shared model",
    "worst_client_accuracy": np.float32(0.25),
    "epsilon": np.inf,
    "dp_delta": 1e-5,
    "dp_delta_smallest": 1e-5,
    "not_covered": UNCOVERED,
    "warnings": ["a thing is odd"],
    "client_test_accuracy": np.array([0.5, np.nan]),
}


@pytest.fixture(autouse=True)
def _no_width_given(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def finished(monkeypatch):
    """Lets a run end at once, with a phase, a warning, a log record and a stray print."""

    def run(config, folder, watcher, callbacks=None):
        watcher.phase("compiling")
        watcher.warn("a thing is odd")
        logging.getLogger("another.package").debug("a detail")
        logging.getLogger("another.package").warning("a complaint")
        print("from a user-defined part")
        return Outcome(pathlib.Path("runs/digits-001"), SUMMARY, "finished", False)

    monkeypatch.setattr(running, "run", run)


def leaves(at, path=()):
    """All commands that can be called, by their words."""
    if not hasattr(at, "commands"):
        return {path: at}
    found = {}
    for name, each in at.commands.items():
        whole = main.command(name) if not path and name in main.COMMANDS else each
        found |= leaves(whole, (*path, name))
    return found


@functools.cache
def every_command():
    return leaves(main.get_command(main.app))


def test_every_command_answers_json_is_quiet_and_has_a_log_level():
    found = every_command()
    assert {path[0] for path in found} == set(main.COMMANDS) and len(found) == 23
    for path, command in found.items():
        options = {name for each in command.params for name in each.opts}
        assert {"--json", "--quiet", "--log-level"} <= options, path


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
LISTS = {("run", "keys"): "run --keys", ("bench", "workloads"): "bench list"}


def documented():
    """The keys that the page lists for each command: all in backquotes before a nested list."""
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    tables = [(row[0].strip("| `"), row[1]) for row in rows if len(row) == 2]
    found = {}
    for command, text in tables:
        own = re.sub(r"a list of.*|, which is.*?(;|\|)", ";", text)
        own = re.sub(r"as in `[a-z.]+`", "", own)
        found[command] = set(re.findall(r"`([a-z_]+)`", own))
    return found


def document(output):
    """Reads what must be one JSON document of the standard, with the keys that the page lists."""

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    assert output.endswith("\n") and output.count("\n") == 1
    found = json.loads(output, parse_constant=refuse)
    assert list(found)[:3] == ["version", "command", "status"] and found["version"] == 1
    own = set(found) - {"version", "command", "status"}
    names = [name for (word, key), name in LISTS.items() if found["command"] == word and key in own]
    assert own == ({"error"} if "error" in own else documented()[[*names, found["command"]][0]])
    return found


def test_a_run_in_a_pipe_breaks_no_line(fedjax_dp, finished):
    status, output, errors = fedjax_dp("run")
    assert status == 0
    [line] = [line for line in output.splitlines() if "test accuracy" in line]
    covered = "which covers the shared model"
    assert line.endswith(f"ε = inf at δ = 1e-05, {covered}, NOT covered: {UNCOVERED}")
    assert "test accuracy of the shared model 0.5000" in line
    assert "compiling" in errors.splitlines() and "compiling" not in output.splitlines()


@pytest.mark.parametrize("shared", [0.6032, None])
def test_accuracies_of_own_and_shared_models_stand_with_what_epsilon_covers(
    fedjax_dp, monkeypatch, shared
):
    """Ditto of the issue: 0.8126 of models that no ε covers, 0.6032 of the one that it does."""
    own = "the shared model, and not the clients' own models"
    found = {
        "test_accuracy": 0.8126,
        "test_accuracy_of": "the clients' own models",
        "covered_models": own,
        "epsilon": 4.0,
        "epsilon_of_shared_record": 12.5,
        "dp_delta_of_shared_record": 3e-5,
        "warnings": [],
    } | ({} if shared is None else {"shared_test_accuracy": shared})
    summary = {k: v for k, v in (SUMMARY | found).items() if k != "not_covered"}
    ended = Outcome(pathlib.Path("x"), summary, "finished", False)
    monkeypatch.setattr(running, "run", lambda *_, **__: ended)
    line = next(line for line in fedjax_dp("run")[1].splitlines() if "accuracy" in line)
    of_shared = "" if shared is None else ", of the shared model 0.6032"
    assert f"test accuracy of the clients' own models 0.8126{of_shared}, worst" in line
    assert (
        f"δ = 1e-05, which covers {own}, for a record that several clients hold: ε = 12.5" in line
    )


def test_the_document_of_a_run_is_all_that_the_output_stream_gets(fedjax_dp, finished):
    status, output, errors = fedjax_dp("run", "--json")
    found = document(output)
    assert status == found["status"] == 0 and found["command"] == "run"
    assert (found["folder"], found["ended"], found["is_futile"]) == (
        "runs/digits-001",
        "finished",
        False,
    )
    assert found["summary"]["epsilon"] == "inf" and found["summary"]["rounds"] == 3
    assert found["summary"]["client_test_accuracy"] == [0.5, None]
    assert "compiling" in errors and "from a user-defined part" in errors


@pytest.mark.parametrize(
    ("word", "seen"),
    [
        ("--log-level=debug", {"compiling", "a thing is odd", "a complaint", "a detail"}),
        ("--log-level=info", {"compiling", "a thing is odd", "a complaint"}),
        ("--log-level=warning", {"a thing is odd", "a complaint"}),
        ("--log-level=error", set()),
        ("--quiet", {"a thing is odd", "a complaint"}),
    ],
)
def test_the_error_stream_follows_its_level(fedjax_dp, finished, word, seen):
    before = logging.getLogger().handlers[:], logging.getLogger().level
    _, output, errors = fedjax_dp("run", word)
    assert before == (logging.getLogger().handlers, logging.getLogger().level)
    said = {"compiling", "a thing is odd", "a complaint", "a detail"}
    assert {text for text in said if text in errors} == seen
    if word == "--quiet":
        assert output.splitlines()[1:] == ["runs/digits-001"]


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (("rnu",), "rnu", "no such command 'rnu'; did you mean 'run'?"),
        (("privacy", "epsilon"), "privacy epsilon", "Missing option '--noise-multiplier'."),
        (("run", "--run.round", "3"), "run", "did you mean 'run.rounds'"),
        (("run", "--run.secret"), "run", "--run.secret needs a value"),
        (("run", "--verbose"), "run", "there is no key 'verbose'"),
        (("run", "a.toml", "b.toml"), "run", "b.toml"),
        (("run", "--log-level", "loud"), "run", "loud"),
        (("data", "fetch", "mnits"), "data fetch", "did you mean 'mnist'?"),
        (("bench", "W0"), "bench", "NAME"),
        (
            ("bench", "W1", "--run.rounds", "3"),
            "bench",
            "overrides must be left out for a workload",
        ),
        (("bench", "x.toml", "--layout", "vmap"), "bench", "others, got ['--layout']"),
    ],
)
def test_a_mistake_is_a_document_too(fedjax_dp, words, command, message):
    status, output, errors = fedjax_dp(*words, "--json")
    found = document(output)
    assert status == found["status"] == 2 and found["command"] == command
    assert message in found["error"] and f"error: {found['error']}\n" == errors
    status, output, errors = fedjax_dp(*words)
    assert status == 2 and not output and message in errors


@pytest.mark.parametrize("words", [(), ("-q",), ("--help",), ("--log-level=error",)])
def test_a_long_command_prints_a_line_before_it_imports_jax(monkeypatch, capsys, words):
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(main, "command", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.app(["sweep", *words])
    assert capsys.readouterr().err == ("" if words else "loading libraries\n")


def test_a_fault_of_the_program_is_a_document_beside_its_traceback(fedjax_dp, monkeypatch):
    def fails(*args):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(running, "run", fails)
    status, output, errors = fedjax_dp("run", "--json")
    assert status == 1 and document(output)["error"] == "TypeError: a fault of ours"
    assert "Traceback" in errors


def test_a_reader_that_has_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "fedjax_dp", "--version"]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("words", [("--json",), ()])
def test_a_run_that_is_ended_at_once_states_the_reason(fedjax_dp, monkeypatch, capsys, words):
    def full(*given):
        raise DiskFull("the disk is full")

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(running, "run", full)
    monkeypatch.setattr("fedjax_dp.cli.progress.os._exit", leave)
    status, output, errors = fedjax_dp("run", *words)
    assert status == 2 and errors == "error: the disk is full\n"
    assert (document(output)["error"] if words else output) == ("the disk is full" if words else "")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("sweep", ()),
        ("_write_tables", ()),
        ("select_privately", ("--select", "private", "--trials", "2")),
    ],
)
def test_a_study_that_fills_the_disk_ends_in_one_line(
    fedjax_dp, monkeypatch, tmp_path, part, words
):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    def leave(status):
        raise SystemExit(status)

    main.command("sweep")
    module = sys.modules["fedjax_dp.cli.sweep"]
    monkeypatch.setattr(module, "sweep", lambda *_, **__: None)
    monkeypatch.setattr(module, part, full)
    monkeypatch.setattr(sys.modules["fedjax_dp.cli.progress"].os, "_exit", leave)
    over = ("--over", "training.learning_rate=0.1,0.2", "--output", tmp_path)
    status, output, errors = fedjax_dp("sweep", *over, *words)
    assert status == 2 and not output
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "the disk is full" in line and "the same call resumes" in line


def test_a_figure_is_a_line_of_its_own_where_it_is_quiet(fedjax_dp):
    status, output, errors = fedjax_dp("privacy", "epsilon", *PRIVACY, "--quiet")
    found = document(fedjax_dp("privacy", "epsilon", *PRIVACY, "--json")[1])
    assert status == 0 and not errors
    assert float(output) == pytest.approx(found["epsilon"], rel=1e-5)


def a_run():
    data = SimpleNamespace(num_examples=4, examples={"x": np.zeros(4), "y": np.arange(4)})
    train = SimpleNamespace(num_examples=4, examples=dict(data.examples))
    population = SimpleNamespace(test=data, train=train, client_test=None, unseen=None)
    return SimpleNamespace(
        config=SimpleNamespace(title="digits", data=SimpleNamespace(name="table")),
        state=SimpleNamespace(round=7),
        experiment=SimpleNamespace(population=population),
        model=SimpleNamespace(full_params=lambda params: params, loss_fn=None),
        params={"w": np.ones(2, np.float32)},
    )


@slow
def test_predictions_appear_whole(fedjax_dp, monkeypatch, tmp_path):
    def stops(file, **arrays):
        file.write(b"a part")
        raise KeyboardInterrupt

    main.command("predict")
    module = sys.modules["fedjax_dp.cli.predict"]
    monkeypatch.setattr(module, "load_run", lambda folder, warn: a_run())
    monkeypatch.setattr(module, "other_data", lambda run, words, **_: None)
    monkeypatch.setattr(module, "predict", lambda model, params, data: np.zeros((4, 10)))
    monkeypatch.setattr(np, "savez", stops)
    assert fedjax_dp("predict", "runs/x", "--output", tmp_path / "p.npz")[0] == 130
    assert not (tmp_path / "p.npz").exists()


@slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_answer_that_cannot_be_written_is_an_error_without_a_traceback():
    words = [sys.executable, "-m", "fedjax_dp", "--version", "--json"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1
    assert ended.stderr.startswith(b"error: ")


def test_what_reads_a_run_answers_json(fedjax_dp, monkeypatch, tmp_path):
    for name in ("evaluate", "predict", "export"):
        main.command(name)
        module = sys.modules[f"fedjax_dp.cli.{name}"]
        monkeypatch.setattr(module, "load_run", lambda folder, warn: a_run())
        if name != "export":
            monkeypatch.setattr(module, "other_data", lambda run, words, **_: None)
        else:
            monkeypatch.setattr(module, "about_model", lambda experiment: {})
    figures = {"test_accuracy": np.float32(0.5), "client_test_accuracy": np.array([1.0, np.nan])}
    figures["test_confusion"] = {"classes": ["a", "b"], "counts": [[3, 0], [1, 2]]}
    evaluate, predict = (sys.modules[f"fedjax_dp.cli.{name}"] for name in ("evaluate", "predict"))
    monkeypatch.setattr(evaluate, "evaluate_run", lambda run, other, by_client: figures)
    monkeypatch.setattr(predict, "predict", lambda model, params, data: np.zeros((4, 10)))
    _, output, _ = fedjax_dp("evaluate", "runs/x", "--json")
    found = document(output)
    assert (found["rounds"], found["figures"]["test_accuracy"]) == (7, 0.5)
    assert found["figures"]["client_test_accuracy"] == [1.0, None]
    _, output, _ = fedjax_dp("evaluate", "runs/x")
    table = 'test_confusion\t{"classes": ["a", "b"], "counts": [[3, 0], [1, 2]]}'
    assert output.splitlines()[1:] == ["figure\tvalue", "test_accuracy\t0.5", table]
    for command, file in ((["predict"], "a.npz"), (["export", "params"], "b.safetensors")):
        words = (*command, "runs/x", "--output", tmp_path / file)
        found = document(fedjax_dp(*words, "--json")[1])
        assert found["file"] == str(tmp_path / file) and (tmp_path / file).exists()
        (tmp_path / file).unlink()
        assert fedjax_dp(*words, "--quiet")[1:] == (f"{tmp_path / file}\n", "")
    assert found["format"] == "safetensors"


def test_predictions_are_a_table_of_names_or_numbers(fedjax_dp, monkeypatch, tmp_path):
    main.command("predict")
    module = sys.modules["fedjax_dp.cli.predict"]
    run = a_run()
    monkeypatch.setattr(module, "load_run", lambda folder, warn: run)
    monkeypatch.setattr(module, "other_data", lambda run, words, **_: None)
    population = run.experiment.population
    population.class_names, population.has_class_labels = ("well", "ill, or not"), True
    population.test.examples["y"] = np.array([1, 0, -1, 1])
    scores = np.array([[0.0, 1], [2, 1], [3, 1], [1, 0]])

    def written(name):
        monkeypatch.setattr(module, "predict", lambda model, params, data: scores)
        code, output, _ = fedjax_dp("predict", "runs/x", "--output", tmp_path / name, "--json")
        return code, document(output), (tmp_path / name).exists() and (tmp_path / name).read_text()

    _, found, text = written("a.csv")
    assert found["arrays"] == ["prediction", "label"]
    assert (
        text
        == 'prediction,label\n"ill, or not","ill, or not"\nwell,well\nwell,\nwell,"ill, or not"\n'
    )
    labels = population.test.examples.pop("y")
    assert written("e.csv")[2] == 'prediction\n"ill, or not"\nwell\nwell\nwell\n'
    population.test.examples["y"] = labels
    population.has_class_labels, scores = False, np.array([[0.5], [1], [2], [3]])
    assert written("b.csv")[2].splitlines()[:2] == ["prediction,label", "0.5,1"]
    scores = np.zeros((4, 3))
    code, found, text = written("c.csv")
    assert code == 2 and not text and "end in .npz unless each example has one" in found["error"]
    assert written("d.txt")[0] == 2
    population.test = None
    said = written("f.csv")[1]["error"]
    assert said.startswith("--part must be one of train, as these data have no other parts; new ro")


LABELS = np.array([[1, 0], [0, -1], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("loss", "has_classes", "names", "scores", "y", "expected"),
    [
        (
            *("sigmoid_binary_cross_entropy", True, ("well", "ill")),
            *([[2.0], [-1], [0.5], [-3]], [1, 1, 0, -1]),
            "prediction,label\nill,ill\nwell,ill\nill,well\nwell,\n",
        ),
        # Of three degrees, the odds of lying above the first and above the second; the last degree
        # of the second row has 0.475, and the others 0.450 and 0.075.
        (
            *("ordinal_cross_entropy", True, ("low", "mid", "high")),
            *([[-2.0, -4], [0.2, -0.1], [2, -2], [3, 2]], [0, 1, 1, 2]),
            "prediction,label\nlow,low\nhigh,mid\nmid,mid\nhigh,high\n",
        ),
        (
            *("poisson_nll", False, ()),
            *(np.log([[1.0], [2], [4], [0.5]]), [1, 3, 5, 0]),
            "prediction,label\n1,1\n2,3\n4,5\n0.5,0\n",
        ),
        (
            *("squared_error", False, ()),
            *([[0.5, 1], [2, 3], [4, 5], [6, 7]], np.arange(8).reshape(4, 2)),
            "prediction_0,prediction_1,label_0,label_1\n0.5,1,0,1\n2,3,2,3\n4,5,4,5\n6,7,6,7\n",
        ),
        (
            *("sigmoid_binary_cross_entropy", False, ("yes", "no")),
            *([[2.0, -1], [-0.5, 3], [0.1, 0.2], [-1, -2]], LABELS),
            "prediction_yes,prediction_no,label_yes,label_no\n1,0,1,0\n0,1,0,\n1,1,1,1\n0,0,0,0\n",
        ),
    ],
)
def test_predictions_are_those_of_the_loss(
    fedjax_dp, monkeypatch, tmp_path, loss, has_classes, names, scores, y, expected
):
    main.command("predict")
    module, run = sys.modules["fedjax_dp.cli.predict"], a_run()
    population, run.model.loss_fn = run.experiment.population, Loss(loss)
    population.class_names, population.has_class_labels = names, has_classes
    population.test.examples["y"] = population.train.examples["y"] = np.array(y)
    monkeypatch.setattr(module, "load_run", lambda folder, warn: run)
    monkeypatch.setattr(module, "other_data", lambda run, words, **_: None)
    monkeypatch.setattr(module, "predict", lambda *_: np.array(scores, np.float32))
    assert fedjax_dp("predict", "runs/x", "--output", tmp_path / "a.csv")[0] == 0
    rows, wanted = ((text.splitlines()) for text in ((tmp_path / "a.csv").read_text(), expected))
    assert rows[0] == wanted[0]
    for row, other in zip(rows[1:], wanted[1:], strict=True):
        for one, two in zip(row.split(","), other.split(","), strict=True):
            assert one == two or float(one) == pytest.approx(float(two), rel=1e-6)


def test_lists_answer_json(fedjax_dp, monkeypatch, tmp_path):
    found = document(fedjax_dp("data", "list", "--data-dir", tmp_path, "--json")[1])
    here = {each["name"]: each["is_present"] for each in found["data"]}
    assert here["digits"] and not here["mnist"]
    fetched = document(fedjax_dp("data", "fetch", "digits", "--data-dir", tmp_path, "--json")[1])
    assert fetched["files"] == []
    found = document(fedjax_dp("bench", "list", "--json")[1])
    assert {each["name"] for each in found["workloads"]} >= {"W1", "W2"}
    bench = sys.modules["fedjax_dp.cli.bench"]
    timed = {"name": "W1", "about": "a thing", "seconds_per_round": 0.5}
    monkeypatch.setattr(bench, "measure", lambda *words, **changes: timed)
    found = document(fedjax_dp("bench", "W1", "--json", "--devices=1")[1])
    assert found["results"] == [timed]


def test_accounting_answers_json(fedjax_dp, tmp_path, monkeypatch):
    budget = ("--epsilon", "2", *PRIVACY[2:])
    assert document(fedjax_dp("privacy", "calibrate", *budget, "--json")[1])["epsilon"] == 2
    for name in ("save", "epsilon_curves"):
        monkeypatch.setattr(plots, name, lambda *words: None)
    words = ("--setting", "2,1", *PRIVACY[4:], "--output", tmp_path / "a.png")
    found = document(fedjax_dp("privacy", "compare", *words, "--json")[1])
    assert list(found["epsilon"]) == ["noise 2, rate 1"]
    (tmp_path / "privacy.md").write_text("words")
    (tmp_path / "privacy.json").write_text('{"claims": []}')
    found = document(fedjax_dp("privacy", "report", tmp_path, "--json")[1])
    assert found["statement"] == {"claims": []}
    _, output, _ = fedjax_dp("privacy", "report", tmp_path, "--latex")
    assert output.strip() == "No differential privacy is claimed."


def test_the_page_lists_every_command():
    commands = {" ".join(path) for path in every_command()} | set(LISTS.values())
    assert {name for name in documented() if not name.startswith("-")} >= commands


def test_keys_in_a_pipe_are_lines_of_four_cells(fedjax_dp):
    _, output, _ = fedjax_dp("run", "--keys")
    lines = [line.split("\t") for line in output.splitlines()]
    assert lines[0] == ["key", "may be", "default", "meaning"]
    assert [tuple(line) for line in lines[1:]] == keys.describe()
    found = document(fedjax_dp("run", "--keys", "--algorithm.name", "fedprox", "--json")[1])
    assert [each["key"] for each in found["keys"]] == [
        key for key, *_ in keys.describe_choice("algorithm.name=fedprox")
    ]
    _, output, _ = fedjax_dp("run", "--keys", "--quiet")
    assert output.split() == [key for key, *_ in keys.describe()]


def test_keys_on_a_terminal_are_no_wider_than_it(monkeypatch):
    main.command("run")
    run, output = sys.modules["fedjax_dp.cli.run"], sys.modules["fedjax_dp.cli.output"]
    text = io.StringIO()
    narrow = Console(file=text, width=80, force_terminal=True, color_system=None, soft_wrap=True)
    answer = run._keys(())
    answer.show(output.Output(narrow, narrow))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.partition(" = ")[0] for line in lines if not line.startswith(" ")]
    assert heads == [key for key, *_ in keys.describe()]
    words = text.getvalue().split()
    assert all(word in words for _, rule, _, about in keys.describe() for word in about.split())


@pytest.mark.parametrize("command", ["run", "audit"])
def test_help_shows_file_and_overrides(fedjax_dp, command):
    status, output, _ = fedjax_dp(command, "--help")
    text = " ".join(output.replace("│", " ").split())
    assert status == 0 and "[OPTIONS] [FILE] [--section.key VALUE]..." in text
    assert "FILE" in text and "A TOML file" in text
    if command == "run":
        assert (
            "Overriding a name, or a table by {}, discards the options that FILE has for the "
            "previous choice."
        ) in text


def test_help_of_what_reads_a_run_shows_the_keys_it_takes(fedjax_dp):
    for command in ("evaluate", "predict"):
        _, output, _ = fedjax_dp(command, "--help")
        [usage] = [line for line in output.splitlines() if "Usage:" in line]
        assert "DIR" in usage and usage.rstrip().endswith("[--data.key VALUE]...")


@pytest.mark.parametrize(
    "words",
    [
        ("a.toml", "--run.rounds=3", "--run.seed", "5"),
        ("--run.rounds", "3", "a.toml", "--run.seed=5"),
        ("--run.rounds", "3", "--run.seed", "5", "a.toml"),
    ],
)
def test_a_file_may_stand_anywhere(fedjax_dp, monkeypatch, tmp_path, words):
    asked = []

    def run(config, folder, watcher, callbacks=None):
        asked.append((config.run.name, config.run.rounds, config.run.seed))
        return Outcome(pathlib.Path("x"), SUMMARY, "finished", False)

    monkeypatch.setattr(running, "run", run)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.toml").write_text('run.name = "mine"\nrun.rounds = 9\n', encoding="utf-8")
    assert fedjax_dp("run", *words)[0] == 0
    assert asked == [("mine", 3, 5)]


def test_a_negative_value_is_no_option(fedjax_dp):
    _, _, errors = fedjax_dp("run", "--training.learning_rate", "-1")
    assert "training.learning_rate must be at least 0, got -1" in errors


def test_python_runs_the_package(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedjax-dp", "--version"])
    monkeypatch.delitem(sys.modules, "fedjax_dp.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedjax_dp", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("fedjax-dp ")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fedjax-dp ev", {"evaluate"}),
        ("fedjax-dp run --training.lear", {"--training.learning_rate"}),
        ("fedjax-dp evaluate --data.num_cl", {"--data.num_clients"}),
        ("fedjax-dp privacy epsilon --no", {"--noise-multiplier"}),
        ("fedjax-dp audit --qu", {"--quiet"}),
        ("fedjax-dp run --algorithm.name fedp", {"fedprox", "fedper", "fedpi"}),
        ("fedjax-dp run --privacy.unit = re", {"record"}),
        ("fedjax-dp run --run.secret t", {"true"}),
        ("fedjax-dp run --participation.sampler c", {"cyclic"}),
        ("fedjax-dp run --acceleration n", {"none"}),
        (
            "fedjax-dp run --algorithm.name=splitting --algorithm.options.in",
            {"--algorithm.options.inner_memory"},
        ),
        ("fedjax-dp evaluate --data.name sh", {"shakespeare"}),
        ("fedjax-dp sweep --over training.lear", {"training.learning_rate"}),
        ("fedjax-dp sweep --over algorithm.name = fedp", {"fedprox", "fedper", "fedpi"}),
        (
            "fedjax-dp sweep --over algorithm.name=fedp",
            {f"algorithm.name=fed{n}" for n in ("prox", "per", "pi")},
        ),
        ("fedjax-dp sweep --over privacy.unit = none,re", {"none,record"}),
        ("fedjax-dp init --method dp_", {"dp_sgd", "dp_fedavg"}),
        ("fedjax-dp data fetch mnist_", {"mnist_by_writer"}),
        ("fedjax-dp privacy epsilon --relation z", {"zero_out"}),
    ],
)
def test_a_shell_completes_commands_options_and_keys(fedjax_dp, monkeypatch, line, found):
    monkeypatch.setenv("_FEDJAX_DP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    status, output, _ = fedjax_dp()
    assert status == 0 and set(output.split()) == found


def test_a_shell_gets_its_script(fedjax_dp, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    status, output, _ = fedjax_dp("--show-completion", "bash")
    assert status == 0 and "_FEDJAX_DP_COMPLETE=complete_bash" in output
    assert "_FEDJAX_DP_COMPLETE" in output


class Clock:
    """Seconds that pass where they are said to."""

    now = 100.0

    def __call__(self):
        return self.now


def progress_lines(rounds, seconds, *, begin=0, is_quiet=False):
    """What a run of so many rounds, each of so many seconds, prints outside a terminal."""
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, soft_wrap=True, highlight=False)
    out = Output(console, console, is_quiet=is_quiet)
    with progress.Progress(out, "run", rounds, clock) as shown:
        shown.phase("compiling")
        clock.now += 20
        shown.done(begin, {})
        for done in range(begin + 1, rounds + 1):
            clock.now += seconds
            shown.done(done, {"epsilon_client": done / 10, "test_accuracy": 0.5})
    return text.getvalue().splitlines()


def test_lines_hold_phase_round_epsilon_and_time_left():
    lines = progress_lines(4, 30.0)
    assert lines == [
        "compiling",
        "round 1 of 4, accuracy 0.500, ε 0.1 (client), about 1 min 30 s left",
        "round 2 of 4, accuracy 0.500, ε 0.2 (client), about 1 min left",
        "round 3 of 4, accuracy 0.500, ε 0.3 (client), about 30 s left",
        "round 4 of 4, accuracy 0.500, ε 0.4 (client)",
    ]
    assert progress_lines(4, 30.0, is_quiet=True) == []


def test_a_resumed_run_knows_how_long_its_own_rounds_took():
    lines = progress_lines(10, 30.0, begin=7)
    assert lines[1].startswith("round 8 of 10") and lines[1].endswith("about 1 min left")


@pytest.mark.parametrize(("rounds", "seconds", "most"), [(10_000, 0.01, 25), (10_000, 10, 300)])
def test_many_rounds_are_few_lines(rounds, seconds, most):
    lines = progress_lines(rounds, seconds)
    assert lines[1].startswith("round 1 of") and lines[-1].startswith(f"round {rounds} of")
    assert 15 <= len(lines) <= most


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (100_800, "1 d 4 h")],
)
def test_a_time_has_its_two_largest_units(seconds, words):
    assert progress.duration(seconds) == words


def test_a_warning_is_logged_once_whatever_handlers_libraries_added(capsys):
    root = logging.getLogger()
    root.addHandler(library := logging.StreamHandler(sys.stderr))
    try:
        with logging_at(LogLevel.warning):
            warnings.warn(SUMMARY["warnings"][0], stacklevel=1)
        assert library in root.handlers
    finally:
        root.removeHandler(library)
    assert capsys.readouterr().err.count("a thing is odd") == 1


def test_no_name_controls_the_terminal():
    text = io.StringIO()
    console = Console(file=text, force_terminal=False, soft_wrap=True)
    out = Output(console, console)
    name = "North\x1b[2J\x1b]0;owned\x07\r"
    for show in (out.say, out.note, out.warn):
        show(f"client {name}\nnext")
    out.table(["client"], [[name]])
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(text.getvalue())
    assert text.getvalue().count(r"North\x1b[2J") == 4 and text.getvalue().count("next") == 3
