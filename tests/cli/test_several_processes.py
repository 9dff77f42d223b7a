"""`fedjax-dp run` in two processes: one run folder, as one process with two devices writes it."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from marks import slow
from run_folders import command, in_subprocess, metrics, read_json
from side_by_side import SECONDS, free_address, run_all

from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.reading.validate import check_processes
from fedjax_dp.experiment.running.processes import require_one_process, start_processes
from fedjax_dp.experiment.running.run import run

ADDRESS = "--execution.coordinator=127.0.0.1:1"
PAIR = (ADDRESS, "--execution.num_processes=2", "--execution.process_id=1")
# Client states, a secret root, a cohort at random and noise at records.
WORDS = (
    *("--data.num_clients=4", "--algorithm.name=scaffold"),
    *("--participation.sampler=poisson", "--participation.cohort_size=3", "--run.plots=false"),
    *("--privacy.record.epsilon=none", "--privacy.record.noise_multiplier=1"),
    *("--execution.devices=2", "--execution.clients_per_chunk=2"),
)


def pair(output, *words) -> list[list[str]]:
    """The command lines of two processes that share a run."""
    address = f"--execution.coordinator={free_address()}"
    return [
        command(
            *("run", *words, "--output", str(output), address),
            *("--execution.num_processes=2", f"--execution.process_id={i}"),
        )
        for i in range(2)
    ]


@slow
def test_two_processes_write_the_run_of_one_which_resumes_it(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    words = *WORDS, "--run.evaluate_every=2"
    run_all(pair(shared, *words, "--run.rounds=2"), environment, tmp_path)
    done = in_subprocess("run", *words, "--run.rounds=3", "--output", str(alone))
    assert done.returncode == 0, done.stderr
    assert len(metrics(shared)) == 2
    assert read_json(shared, "environment.json")["devices"] == ["cpu", "cpu"]
    done = in_subprocess("run", "--resume", str(shared), "--run.rounds=3")
    assert done.returncode == 0, done.stderr
    for found, expected in zip(metrics(shared), metrics(alone), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@slow
def test_an_interruption_of_one_process_ends_both_after_the_same_round(tmp_path):
    output = tmp_path / "run"
    words = ("--run.rounds=100000", "--run.checkpoint_every=1", "--run.evaluate_every=100000")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
        for line in pair(output, *WORDS, *words, "--run.secret=true")
    ]
    try:
        limit = time.monotonic() + SECONDS
        while not (output / "metrics.jsonl").exists() or len(metrics(output)) < 2:
            assert time.monotonic() < limit and not any(p.poll() for p in started)
            time.sleep(0.1)
        started[1].send_signal(signal.SIGTERM)
        assert [process.wait(SECONDS) for process in started] == [130, 130]
    finally:
        for process in started:
            process.kill()
            process.wait()
    rounds = len(metrics(output))
    saved = [int(path.name) for path in (output / "checkpoint").iterdir() if path.name.isdigit()]
    assert max(saved) == rounds
    assert read_json(output, "summary.json")["ended"] == "interrupted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([ADDRESS], r"execution\.num_processes must be given with an address"),
        (["--execution.process_id=0"], r"execution\.process_id must be given with an address"),
        ([*PAIR[:2], "--execution.process_id=2"], r"process_id must be below .* = 2, got 2"),
        ([*PAIR, "--execution.devices=3"], r"execution\.devices must be 'auto' or a multiple"),
        ([*PAIR, "--execution.placement=host"], r"execution\.placement must be 'auto' or 'dev"),
        ([*PAIR, "--execution.clients_per_chunk=tuned"], "clients_per_chunk must be a number"),
        ([*PAIR, "--run.callbacks.early_stopping={}"], r"run\.callbacks must be none for several"),
    ],
)
def test_what_several_processes_cannot_run_is_refused_before_they_connect(words, message):
    with pytest.raises(ValueError, match=message):
        start_processes(load_config(None, words))


def test_commands_that_connect_no_processes_refuse_several(tmp_path):
    config = load_config(None, PAIR)
    check_processes(config)
    rule = "execution.coordinator must be none"
    with pytest.raises(ValueError, match=rule):
        require_one_process(config.execution, "a run that is resumed")
    with pytest.raises(ValueError, match=rule):
        run(config, tmp_path / "run", callbacks={"mine": None})
    with pytest.raises(ValueError, match=rule):
        assemble(config)
