"""Odd words and files end a command in one line that names them, before any longer work."""

import os
import subprocess
import sys

import pytest
from marks import slow

pytestmark = slow

HUGE = "1" + "0" * 400
NOISE = ("--noise-multiplier=1", "--sampling-rate=0.1", "--delta=1e-5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sweep", "--over", "training.learning_rate=" + "[" * 3000), "nested hundreds deep"),
        (
            ("sweep", "--search=optuna", "--trials=1", "--over", f"run.rounds=1..{HUGE}"),
            "--over must be a range of numbers",
        ),
        (("sweep", "--over", "run.rounds=1,2", "--settings", "mac.csv"), "mac.csv, line 1 must be"),
        (("run", "--run.rounds=3\nx = 4"), "run.rounds must be"),
        (("run", "--output=file/run"), "got 'file/run'"),
        (("report", "~nobody_of_this_name/run"), "got '~nobody_of_this_name/run'"),
        (("init", ".", "--schema"), "FILE must be a new file"),
        (("init", "a.toml", "--data=~nobody.csv", "--label=y"), "got '~nobody.csv'"),
        (("privacy", "epsilon", *NOISE, f"--steps={HUGE}"), "--steps must be at most 2^53"),
        (
            ("privacy", "epsilon", *NOISE, "--steps=1", "--relation=replace-one"),
            "relation must be one of add_remove, replace_one, zero_out",
        ),
        (
            ("sweep", "--search=optuna", "--trials=1e300", "--over", "run.rounds=1..2"),
            "--trials must be below 2^31",
        ),
        (
            ("privacy", "epsilon", *NOISE, "--steps=1", f"--num-units={HUGE}"),
            "--num-units must be at most 2^53",
        ),
        (
            ("privacy", "compare", "--setting=1,0.1", "--steps=2", "--delta=1e-5", "--output=."),
            "--output must be a file that ends in .png",
        ),
        (("evaluate", "run", "--by-client=file/x.jsonl"), "--by-client must be a path"),
        (("predict", "run", "--output=file/x.csv"), "--output must be a path"),
        (("export", "params", "run", "--output=file/x.npz"), "--output must be a path"),
        (("run", "--model.name=ends.py:f"), "line 1: SystemExit: 0"),
        (("bench", "W1", "--compare=."), "--compare must be a file that can be read"),
        (("bench", "W1", "--devices=²"), "--devices must be auto or a number"),
        (("bench", "W1", "--layout=²"), "--layout must be auto"),
        (("bench", "W1", "--project=²"), "--project must be a number of devices"),
        (("estimate", "--device=h100x" + "9" * 30), "device must be a device"),
        (
            ("sweep", "--over=run.rounds=1,2", "--on=local", "--worker=a=" + "[" * 3000),
            "--worker a must hold no brackets nested hundreds deep",
        ),
    ],
)
def test_what_cannot_be_is_named_in_one_line(fedjax_dp, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder", "utf-8")
    (tmp_path / "mac.csv").write_text("run.rounds,training.learning_rate\r1,0.1\r2,0.2", "utf-8")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)", "utf-8")
    status, output, errors = fedjax_dp(*words)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and not output and message in line
    assert "reading the run" not in errors


def test_init_asks_nothing_where_nobody_can_answer(fedjax_dp, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert fedjax_dp("init", tmp_path / "new" / "a.toml")[0] == 0


def test_a_value_that_two_options_give_is_refused(fedjax_dp, tmp_path):
    words = ("init", tmp_path / "a.toml", "--epsilon=3", "--privacy.record.epsilon=1")
    status, _, errors = fedjax_dp(*words)
    assert status == 2 and "got ['privacy.record.epsilon']" in errors
    assert not any(tmp_path.iterdir())


def test_a_platform_that_does_not_start_ends_every_command_in_one_line():
    words = [sys.executable, "-m", "fedjax_dp", "measure"]
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    ended = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "JAX_PLATFORMS must name platforms" in ended.stderr
