"""`fedjax-dp run` in two processes: one run folder, as one process with two devices writes it."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from marks import slow
from run_folders import ENTRY, command, in_subprocess, metrics, read_json, saved_arrays
from side_by_side import SECONDS, free_address, run_all

from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.reading.validate import check_processes
from fedjax_dp.experiment.running import processes
from fedjax_dp.experiment.running.processes import (
    HEARTBEAT_SECONDS,
    require_one_process,
    start_processes,
)
from fedjax_dp.experiment.running.run import run
from fedjax_dp.io import Checkpoints

ADDRESS = "--execution.coordinator=127.0.0.1:1"
PAIR = (ADDRESS, "--execution.num_processes=2", "--execution.process_id=1")
# Client states, a secret root, a cohort at random and noise at records.
WORDS = (
    *("--data.num_clients=4", "--algorithm.name=scaffold"),
    *("--participation.sampler=poisson", "--participation.cohort_size=3", "--run.plots=false"),
    *("--privacy.record.epsilon=none", "--privacy.record.noise_multiplier=1"),
    "--execution.clients_per_chunk=2",
)
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def together(count, *words) -> list[list[str]]:
    """The command lines of processes that share a run, with a device each."""
    shared = (
        *(f"--execution.coordinator={free_address()}", f"--execution.num_processes={count}"),
        f"--execution.devices={count}",
    )
    return [command("run", *words, *shared, f"--execution.process_id={i}") for i in range(count)]


@slow
def test_runs_resume_in_other_numbers_of_processes(tmp_path):
    """Two write a run; then one resumes it, two, and four, as one process plays it."""
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    # A callback, which has the rounds of all of them before it.
    words = *WORDS, "--run.evaluate_every=2", "--run.callbacks.early_stopping.patience=9"
    run_all(together(2, *words, "--run.rounds=2", "--output", str(shared)), ENVIRONMENT, tmp_path)
    assert len(metrics(shared)) == 2
    assert read_json(shared, "environment.json")["devices"] == ["cpu", "cpu"]
    resumed = "--resume", str(shared)
    done = in_subprocess("run", *resumed, "--run.rounds=3", "--execution.devices=1")
    assert done.returncode == 0, done.stderr
    for count, last in ((2, 4), (4, 5)):
        lines = together(count, *resumed, f"--run.rounds={last}")
        run_all(lines, ENVIRONMENT, tmp_path)
        assert len(read_json(shared, "environment.json")["devices"]) == count
    rounds = "--run.rounds=5", "--execution.devices=2"
    done = in_subprocess("run", *words, *rounds, "--output", str(alone))
    assert done.returncode == 0, done.stderr
    for found, expected in zip(metrics(shared), metrics(alone), strict=True):
        # The last round before it is resumed is evaluated too, and devices have slots of their own.
        assert found.keys() >= expected.keys()
        for key in expected.keys() - {"padding_share"}:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)
    (_, arrays, extra), (_, other_arrays, other_extra) = map(saved_arrays, (shared, alone))
    assert arrays.keys() == other_arrays.keys()
    for key, value in other_arrays.items():
        np.testing.assert_allclose(arrays[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    assert extra["ledgers"] == other_extra["ledgers"]
    for name in ("privacy.json", "privacy.md"):
        assert (shared / name).read_bytes() == (alone / name).read_bytes()


@contextlib.contextmanager
def running(output, lines, folder, first_round):
    """Starts processes and waits until they have logged a round; ends them at the end."""
    logs = [folder / f"{i}.log" for i in range(len(lines))]
    started = [
        subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=log.open("w"))
        for line, log in zip(lines, logs, strict=True)
    ]
    try:
        limit = time.monotonic() + SECONDS
        while not (output / "metrics.jsonl").exists() or len(metrics(output)) < first_round:
            found = [log.read_text()[-4000:] for log in logs]
            assert time.monotonic() < limit and not any(p.poll() for p in started), found
            time.sleep(0.1)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


# A process that dies by a signal while it writes its fourth checkpoint.
DYING = f"""
import os, signal
import orbax.checkpoint as ocp
write, saved = ocp.type_handlers.ArrayHandler.serialize, []
async def dying(*args, **options):
    writes = await write(*args, **options)
    saved.append(True)
    if len(saved) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return writes
ocp.type_handlers.ArrayHandler.serialize = dying
{ENTRY}
"""


@slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_death_ends_the_others_and_an_interruption_ends_all_after_the_same_round(
    tmp_path, killed
):
    output, other = tmp_path / "run", 1 - killed
    words = ("--run.rounds=100000", "--run.checkpoint_every=1", "--run.evaluate_every=100000")
    lines = together(2, *WORDS, *words, "--run.secret=true", "--output", str(output))
    lines[killed][2] = DYING
    with running(output, lines, tmp_path, 2) as started:
        # While the checkpoint of round 3 is written, after that of round 0.
        assert started[killed].wait(SECONDS) == -signal.SIGKILL
        # Twice the heartbeat, since both share the cores of this machine with other work.
        assert started[other].wait(2 * HEARTBEAT_SECONDS) not in (0, 130)
    assert saved_arrays(output)[0] == 2
    assert Checkpoints(output / "checkpoint", is_read_only=True).newest_intact() == (2, {})
    before = len(metrics(output))
    lines = together(2, "--resume", str(output))
    with running(output, lines, tmp_path, before + 2) as started:
        started[other].send_signal(signal.SIGTERM)
        assert [process.wait(SECONDS) for process in started] == [130, 130]
    rounds = [row["round"] for row in metrics(output)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert saved_arrays(output)[0] == len(rounds)
    assert read_json(output, "summary.json")["ended"] == "interrupted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([ADDRESS], r"execution\.num_processes must be given with an address"),
        (["--execution.process_id=0"], r"execution\.process_id must be given with an address"),
        ([*PAIR[:2], "--execution.process_id=2"], r"process_id must be below .* = 2, got 2"),
        *(
            (
                [*PAIR[1:], f"--execution.coordinator={address}"],
                "coordinator must be auto, or an ad",
            )
            for address in ("localhost", "http://10.0.0.1:1234", ":1234", "10.0.0.1:0", "a:66666")
        ),
        ([*PAIR, "--execution.devices=3"], r"execution\.devices must be 'auto' or a multiple"),
        ([*PAIR, "--execution.placement=disk"], r"execution\.placement must not be 'disk' for"),
        ([*PAIR, "--execution.split_clients=true"], "split_clients must be False for several"),
        ([*PAIR, "--execution.clients_per_chunk=tuned"], "clients_per_chunk must be a number"),
        (
            [*PAIR, "--execution.model_devices=2"],
            "model_devices must be left out for several",
        ),
    ],
)
def test_what_several_processes_cannot_run_is_refused_before_they_connect(words, message):
    with pytest.raises(ValueError, match=message):
        start_processes(load_config(None, words))


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_first_process_that_does_not_answer_is_named(is_silent, monkeypatch):
    monkeypatch.setattr(processes, "_START_SECONDS", 0.01)
    monkeypatch.setattr(processes, "_ANSWER_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if is_silent else 1
        words = [*PAIR[1:], f"--execution.coordinator=127.0.0.1:{port}"]
        with pytest.raises(ValueError, match=r"coordinator must be the address of the first proc"):
            start_processes(load_config(None, words))


def test_commands_that_connect_no_processes_refuse_several(tmp_path):
    config = load_config(None, PAIR)
    check_processes(config.execution)
    rule = "execution.coordinator must be none"
    with pytest.raises(ValueError, match=rule):
        require_one_process(config.execution, "a deployment")
    with pytest.raises(ValueError, match=rule):
        run(config, tmp_path / "run", deployment=object())
    with pytest.raises(ValueError, match=rule):
        assemble(config)
