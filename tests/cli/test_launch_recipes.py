"""The recipes of the page on several processes: a launcher's variables become a command's words."""

import pathlib
import re
import stat
import subprocess
import sys
import types

import pytest
import yaml

from fedjax_dp import experiment
from fedjax_dp.cli.main import command
from fedjax_dp.experiment.reading.validate import check_processes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "scaling.md"
# Programs that stand for those of the recipes.
PROGRAMS = {
    "fedjax-dp": "printf '%s\\n' \"$@\"",
    "srun": 'exec "$@"',
    "gcloud": 'for word; do :; done; exec bash -c "${word#--command=}"',
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that all machines share, with a configuration and the programs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[run]\nrounds = 3\n", "utf-8")
    for name, script in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{script}\n", "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return tmp_path


def recipe(name, language):
    """The code of a launcher's recipe."""
    text = PAGE.read_text("utf-8").partition(f"\n**{name}**")[2]
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def started(script, place, **variables):
    """What `fedjax-dp` is called with, by a script that a launcher runs with its variables."""
    done = subprocess.run(
        ["bash", "-c", script.replace("/runs", str(place))],
        env={"PATH": f"{place}:/usr/bin:/bin", **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    name, *words = done.stdout.splitlines()
    parsed = command(name).make_context(name, words)
    config = experiment.load_config(parsed.params["file"], parsed.args)
    check_processes(config.execution)
    return config, parsed.params["resume"]


def scripts():
    """By launcher: the script, and the variables of each process."""
    jobs = yaml.safe_load(recipe("Kubernetes", "yaml"))["spec"]["replicatedJobs"]
    (pods,) = (job["template"]["spec"] for job in jobs)
    (container,) = pods["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"] and pods["parallelism"] == pods["completions"]
    sky = yaml.safe_load(recipe("SkyPilot", "yaml"))
    of_nodes = {
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{i + 1}" for i in range(sky["num_nodes"])),
        "SKYPILOT_NUM_NODES": str(sky["num_nodes"]),
    }
    return {
        "Slurm": (recipe("Slurm", "sh"), [{}]),
        "TPU pods": (recipe("TPU pods", "sh"), [{}]),
        "Kubernetes": (
            container["args"][0],
            [{"JOB_COMPLETION_INDEX": str(i)} for i in range(pods["completions"])],
        ),
        "SkyPilot": (
            sky["run"],
            [{**of_nodes, "SKYPILOT_NODE_RANK": str(i)} for i in range(sky["num_nodes"])],
        ),
    }


@pytest.mark.parametrize("launcher", scripts())
def test_a_launcher_starts_processes_that_find_each_other(launcher, place):
    script, processes = scripts()[launcher]
    found = [started(script, place, **variables) for variables in processes]
    assert {resume for _, resume in found} == {None}
    sections = [config.execution for config, _ in found]
    assert found[0][0].run.rounds == 3
    if len(processes) == 1:
        assert sections[0].coordinator == "auto"
        return
    (address,) = {section.coordinator for section in sections}
    assert address == {
        "Kubernetes": "federated-workers-0-0.federated:4567",
        "SkyPilot": "10.0.0.1:4567",
    }.get(launcher)
    assert {section.num_processes for section in sections} == {len(processes)}
    assert [section.process_id for section in sections] == list(range(len(processes)))


@pytest.mark.parametrize("launcher", ["Slurm", "Kubernetes", "SkyPilot"])
def test_a_job_that_is_started_again_resumes_its_run(launcher, place):
    (place / "out").mkdir()
    (place / "out" / "config.toml").touch()
    script, processes = scripts()[launcher]
    config, resume = started(script, place, **processes[0])
    assert resume == "out" and config.execution.devices == "auto"


def test_names_of_pods_are_those_that_kubernetes_gives():
    jobs = yaml.safe_load(recipe("Kubernetes", "yaml"))
    name = jobs["metadata"]["name"], jobs["spec"]["replicatedJobs"][0]["name"]
    # The first pod of the first job, in the service that has the name of the set.
    assert f"{name[0]}-{name[1]}-0-0.{name[0]}:" in recipe("Kubernetes", "yaml")


def test_ray_runs_the_experiment_in_each_worker(place, monkeypatch):
    runs, trainers = [], []

    class Trainer:
        def __init__(self, work, *, train_loop_config, scaling_config):
            trainers.append(scaling_config)
            self.fit = lambda: work(train_loop_config)

    modules = {"ray": {}, "ray.train": {"ScalingConfig": dict}, "ray.train.v2": {}}
    modules["ray.train.v2.jax"] = {"JaxTrainer": Trainer}
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(experiment, "run", lambda *args: runs.append(args))
    exec(recipe("Ray Train", "py").replace("/runs", str(place)), {})
    ((config, folder),) = runs
    assert config.run.rounds == 100 and folder == f"{place}/out"
    assert trainers == [{"num_workers": 4, "use_gpu": True}]
