"""The list of what needs a GPU: it stops in time, and continues where it stopped."""

import json
import pathlib

import pytest
from marks import slow

from experiments import card

# Counts its calls, and ends by itself in the call after the one that was stopped in time.
TINY = """
import pathlib, signal, sys, time
file = pathlib.Path(sys.argv[1])
def stop(*_):
    file.write_text("a checkpoint")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
while not file.exists():
    time.sleep(0.01)
print("continued from", file.read_text())
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder of modules that commands find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tiny.py").write_text(TINY, "utf-8")
    (tmp_path / "wrong.py").write_text("raise SystemExit('wrong')", "utf-8")
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
        "utf-8",
    )
    return tmp_path


def command(name, *words):
    return card.Command(name, words, "nothing", 1)


def test_a_command_is_stopped_with_a_checkpoint_and_continues(modules):
    """A first call that is too short for the start of Python is followed by a longer one."""
    file, output = modules / "checkpoint", modules / "output"
    listed = [command("first", "tiny", str(file)), command("second", "tiny", str(file))]
    for seconds in (1, 4, 16, 64):
        left = card.play_all(listed, output, seconds, 0.2, lambda text: None)
        assert left == listed, "a command that is stopped stays first, and none is begun after it"
        assert not (output / "second.log").exists()
        if file.exists():
            break
    said = []
    assert card.play_all(listed, output, 60, 0.2, said.append) == []
    assert "continued from a checkpoint" in (output / "first.log").read_text("utf-8")
    entry = json.loads((output / "journal.json").read_text("utf-8"))["first"]
    assert entry["status"] == "done" and entry["calls"] >= 2
    assert card.play_all(listed, output, 60, 0.2, said.append) == []
    assert said[-2:] == ["first: done in an earlier call", "second: done in an earlier call"]


def test_a_command_that_fails_is_left_out_and_others_run(modules):
    output, said = modules / "output", []
    (modules / "checkpoint").write_text("nothing", "utf-8")
    listed = [command("wrong", "wrong"), command("right", "tiny", str(modules / "checkpoint"))]
    assert card.play_all(listed, output, 60, 0.2, said.append) == []
    assert said[0].startswith("wrong: failed") and said[1].startswith("right: done")
    assert "wrong" in (output / "wrong.log").read_text("utf-8")
    # With other words it is another command.
    mended = [command("wrong", "tiny", str(modules / "checkpoint"))]
    assert card.play_all(mended, output, 60, 0.2, said.append) == []
    assert said[-1].startswith("wrong: done")


def test_a_command_that_does_not_stop_is_ended(modules):
    assert card.play(command("stubborn", "stubborn"), modules, 0.5, 0.1) == "stopped"


def test_names_are_unique_and_commands_continue():
    listed = card.commands()
    assert len({each.name for each in listed}) == len(listed) > 5
    for each in listed:
        module, words = each.words[0], each.words
        assert (card.ROOT / pathlib.Path(*module.split("."))).with_suffix(".py").is_file()
        assert "{" not in each.text and each.minutes > 0 and each.decides
        assert "--output" in words or module.endswith(".tables") or "table" in words
        assert each.name in card.table()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "table_9"], "--only must name commands of table_4_1, "),
        (["--minutes", "1"], "--minutes must be at least 2.5, got 1"),
    ],
)
def test_what_a_call_refuses(words, message, capsys):
    with pytest.raises(SystemExit):
        card.main(words)
    assert message in capsys.readouterr().err


SWEEP = """
import pathlib, sys
from experiments.sweep import Study, main
axes = {"rate": {r: [f"--training.learning_rate={r}"] for r in ("0.1", "0.2")}, "seed": {"0": []}}
words = {"rate": "rate", "seed": "seed"}
main(Study("tiny", None, axes, "rate", "seed", {"test_accuracy": 100.0}), sys.argv[1:])
"""


@slow
def test_a_sweep_is_stopped_between_rounds_and_resumed(modules):
    (modules / "grid.py").write_text(SWEEP, "utf-8")
    runs, output = modules / "runs", modules / "output"
    rounds = "--run.rounds=4000", "--run.evaluate_every=20", "--run.checkpoint_every=4000"
    listed = [command("grid", "grid", "--output", str(runs), *rounds)]
    for seconds in (30, 60, 120, 240):
        left = card.play_all(listed, output, seconds, 15, lambda text: None)
        if not left:
            break
    summaries = [json.loads(f.read_text("utf-8")) for f in sorted(runs.glob("*/summary.json"))]
    assert [s["rounds"] for s in summaries] == [4000, 4000], (output / "grid.log").read_text(
        "utf-8"
    )
