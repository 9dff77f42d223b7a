"""Points that Optuna chooses: within their ranges, resumed as they began, covered by nothing."""

import json
import pathlib
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from marks import slow, telling
from run_folders import SMALL, read_json

from fedjax_dp.experiment import Study
from fedjax_dp.experiment.components.experiment import Progress

pytest.importorskip("optuna")
from fedjax_dp.experiment.studies import search as module
from fedjax_dp.experiment.studies.search import HALVING, Plan, Span, search

STUDY = Study("digits", None, {}, "", "", {"test_accuracy": 1.0})
RATE, SIZE, NAME = "training.learning_rate", "training.batch_size", "algorithm.name"
PLAN = Plan(
    {RATE: Span(0.01, 1.0, is_log=True), SIZE: Span(2, 9), NAME: ["fedavg", "fedprox"]},
    trials=10,
    at_once=4,
)
ROUNDS = 16


@pytest.fixture
def played(monkeypatch):
    """Runs whose accuracy and loss are their learning rate; the numbers of each batch's runs."""
    batches = []

    def run_all(study, jobs, labels, report, watcher, stated, cluster):
        batches.append(sorted(jobs))
        for job in jobs.values():
            rows, rate = [], job.config.training.learning_rate
            figures = {"test_accuracy": rate, "test_loss": rate}
            summary = {**figures, "rounds": ROUNDS, "ended": "finished"}
            for done in range(1, ROUNDS + 1):
                rows.append({"round": done, **figures})
                experiment = SimpleNamespace(
                    config=SimpleNamespace(run=SimpleNamespace(rounds=ROUNDS))
                )
                progress = Progress(rows, None, experiment, job.folder)
                # As another process has them.
                callbacks = pickle.loads(pickle.dumps(job.callbacks))
                if any(each.call(progress) for each in callbacks.values()):
                    summary |= {"rounds": done, "ended": "callback", "stopped_by": HALVING}
                    break
            job.folder.mkdir(exist_ok=True)
            (job.folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    monkeypatch.setattr(module, "run_all", run_all)
    return batches


def points(entries):
    return {e["trial"]: (e[RATE], e[SIZE], e[NAME]) for e in entries}


def test_points_lie_in_their_ranges_and_the_best_is_first(played, tmp_path):
    entries = search(STUDY, PLAN, tmp_path)
    assert played == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(set(points(entries).values())) == 10
    for entry in entries:
        assert 0.01 <= float(entry[RATE]) <= 1 and int(entry[SIZE]) in range(2, 10)
        assert entry[NAME] in ("fedavg", "fedprox") and entry["state"] == "complete"
    rates = [float(e[RATE]) for e in entries]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_resumes_with_the_points_of_an_uninterrupted_one(
    played, tmp_path, monkeypatch, sampler
):
    plan = PLAN._replace(sampler=sampler, trials=14)
    whole = search(STUDY, plan, tmp_path / "whole")
    inner = module.run_all

    def dying(study, jobs, *rest, **more):
        if 12 in jobs:
            raise KeyboardInterrupt
        inner(study, jobs, *rest, **more)

    monkeypatch.setattr(module, "run_all", dying)
    with pytest.raises(KeyboardInterrupt):
        search(STUDY, plan, tmp_path / "two")
    monkeypatch.setattr(module, "run_all", inner)
    before = len(played)
    assert points(search(STUDY, plan, tmp_path / "two")) == points(whole)
    # Those that were chosen before the interruption, and no others.
    assert played[before:] == [[12, 13]]
    # More runs continue a search, and others need a folder of their own.
    more = search(STUDY, plan._replace(trials=15), tmp_path / "two")
    assert len(more) == 15 and played[-1] == [14]
    for other in (plan._replace(seed=1), plan._replace(space={RATE: Span(0.1, 1.0)})):
        with pytest.raises(ValueError, match="must be resumed with the same keys"):
            search(STUDY, other, tmp_path / "two")


@pytest.mark.parametrize("metric", ["test_accuracy", "test_loss"])
def test_the_worse_runs_end_early(played, tmp_path, metric):
    """By asynchronous halving: of those at a rung so far the best quarter stays."""
    is_larger = metric == "test_accuracy"
    plan = PLAN._replace(space={RATE: Span(0.01, 1.0)}, is_halving=True, sampler="random")
    plan = plan._replace(metric=metric)
    entries = search(STUDY, plan, tmp_path)
    rungs = {1: [], 4: [], 16: []}
    for number in range(1, 11):
        [entry] = [e for e in entries if e["trial"] == number]
        rate, expected = float(entry[RATE]), ("complete", ROUNDS)
        for rung, there in rungs.items():
            there.append(rate)
            best = sorted(there, reverse=is_larger)[: max(1, len(there) // 4)]
            if rung < ROUNDS and rate not in best:
                expected = ("ended early", rung)
                break
        assert (entry["state"], entry["rounds"]) == expected
    assert {e["state"] for e in entries} == {"complete", "ended early"}
    assert entries[0]["state"] == "complete" and entries[-1]["state"] == "ended early"
    rates = [float(e[RATE]) for e in entries if e["state"] == "complete"]
    assert len(rates) > 1 and rates == sorted(rates, reverse=is_larger)


@telling
def test_a_database_has_the_searches_of_several_folders(played, tmp_path):
    plan = PLAN._replace(trials=5, is_halving=True, sampler="random")
    alone = search(STUDY, plan, tmp_path / "alone")
    database = f"sqlite:///{tmp_path}/search.db"
    for folder in ("one", "two"):
        part = plan._replace(trials=4)
        assert len(search(STUDY, part, tmp_path / folder, database=database)) == 4
        assert search(STUDY, plan, tmp_path / folder, database=database) == alone
        assert not (tmp_path / folder / module.STUDY_FILE).exists()
    assert played == [[0, 1, 2, 3], [4]] * 3
    for wrong in ("a:secret@b", f"sqlite:///{tmp_path}/secret/search.db", "nothing://a:secret@b/c"):
        with pytest.raises(ValueError, match=r"^--storage must be the address") as refused:
            search(STUDY, plan, tmp_path / "three", database=wrong)
        assert "secret" not in str(refused.value)
    shutil.rmtree(tmp_path / "one" / "trial-0002")
    with pytest.raises(ValueError, match=r"must have the runs of its trials.*none in trial-0002"):
        search(STUDY, plan, tmp_path / "one", database=database)
    with pytest.raises(ValueError, match=r"^--storage must be a file or a server"):
        search(STUDY, plan, tmp_path / "three", database="sqlite://")


def test_values_that_are_not_allowed_are_refused_before_any_run(played, tmp_path):
    for space in ({RATE: Span(-1.0, 1.0)}, {NAME: ["fedavg", "fedavgg"]}):
        with pytest.raises(ValueError, match=r"learning_rate|algorithm.name"):
            search(STUDY, PLAN._replace(space=space), tmp_path / "new")
    assert not played and not (tmp_path / "new").exists()


def test_a_listed_value_that_no_run_can_have_is_refused_before_any(played, tmp_path):
    units = {"privacy.unit": ["none", "record"], NAME: ["fedavg", "dp_fedavg"]}
    with pytest.raises(ValueError, match=r"^algorithm\.name=dp_fedavg: privacy\.unit must be"):
        search(STUDY, PLAN._replace(space=units), tmp_path / "new")
    assert not played and not (tmp_path / "new").exists()
    # A value that some others suit is tried beside all.
    units |= {NAME: ["fedavg", "dp_sgd"]}
    assert len(search(STUDY, PLAN._replace(space=units), tmp_path / "new")) == 10


def test_a_setting_that_its_run_refuses_fails_and_the_others_run(played, tmp_path, monkeypatch):
    inner, said = module.run_all, []

    def refusing(study, jobs, *rest, **more):
        for job in jobs.values():
            if job.config.algorithm.name == "fedprox":
                raise ValueError("privacy.client.epsilon must allow at least one round")
        inner(study, jobs, *rest, **more)

    monkeypatch.setattr(module, "run_all", refusing)
    entries = search(STUDY, PLAN, tmp_path, report=said.append)
    states = {(e[NAME], e["state"], e["test_accuracy"] is None) for e in entries}
    assert states == {("fedavg", "complete", False), ("fedprox", "failed", True)}
    refused = [e for e in entries if e["state"] == "failed"]
    assert entries[-len(refused) :] == refused
    assert sum("refused: privacy.client.epsilon must allow" in line for line in said) == len(
        refused
    )
    # Once, and in no repetition.
    before = len(played)
    assert search(STUDY, PLAN, tmp_path) == entries and len(played) == before
    # A run that has a folder was not refused: an error of it ends the search, and it runs again.

    def in_use(study, jobs, *rest, **more):
        for job in jobs.values():
            job.folder.mkdir(exist_ok=True)
        raise ValueError("the run folder is already in use by another process")

    monkeypatch.setattr(module, "run_all", in_use)
    with pytest.raises(ValueError, match="the run folder"):
        search(STUDY, PLAN._replace(trials=11), tmp_path)
    monkeypatch.setattr(module, "run_all", inner)
    assert search(STUDY, PLAN._replace(trials=11), tmp_path)[0]["state"] == "complete"


WORDS = ("sweep", "--search=optuna", "--over", f"{RATE}=0.01..1:log", "--trials", "3")


def test_the_command_searches_and_writes_a_table(fedjax_dp, played, tmp_path):
    status, out, _ = fedjax_dp(*WORDS, "--output", str(tmp_path / "s"), "--at-once=2", "--json")
    document = json.loads(out)
    assert status == 0 and document["points"] == 3 and played == [[0, 1], [2]]
    lines = (tmp_path / "s" / "table.csv").read_text().splitlines()
    assert lines[0].startswith(f"trial,{RATE},state") and len(lines) == 4
    best = max(document["entries"], key=lambda e: e["test_accuracy"])
    assert f"| {best['trial']} |" in (tmp_path / "s" / "table.md").read_text().splitlines()[4]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((*WORDS, "--select", "private"), "--select must not be combined with --search"),
        ((*WORDS[:4],), "--trials must be given"),
        ((*WORDS[:5], "2.5"), "--trials must be given, the whole number"),
        ((*WORDS[:5], "inf"), "--trials must be given, the whole number"),
        ((*WORDS, "--trials-shape", "1"), "--trials-shape must be left out with --search"),
        (
            (*WORDS, "--pruner=halving", "--run.release=private", "--run.secret=true"),
            "run.release must not be combined with --pruner",
        ),
        ((*WORDS, "--over", "run.seed=0,1"), "not name run.seed"),
        ((*WORDS, "--over", "training.batch_size=9..2"), "--over must be a range"),
        ((*WORDS, "--over", "training.momentum=0..1:log"), "training.momentum|must be a range"),
        (("sweep", "--over", "training.batch_size=2,4", "--pruner=halving"), "--search must be"),
        ((*WORDS, "--at-once", "0"), "--at-once must be"),
        ((*WORDS, "--metric", "std_client_accuracy"), "--metric must name a metric that ends in"),
        (("sweep", "--over", "training.batch_size=2,4", "--metric=test_loss"), "--select or"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_any_work(
    fedjax_dp, played, tmp_path, words, rule
):
    status, _, errors = fedjax_dp(*words, "--output", str(tmp_path / "grid"))
    said = " ".join(errors.split())
    assert status == 2 and any(part in said for part in rule.split("|")), said
    assert not played and not (tmp_path / "grid").exists()


@telling
def test_the_statement_of_a_run_covers_no_choice(tmp_path):
    plan = Plan({RATE: Span(0.1, 0.5)}, trials=2, is_halving=True)
    words = (SMALL[0], "--run.rounds=2", "--run.evaluate_every=1", "--execution.devices=1")
    entries = search(STUDY, plan, tmp_path, words, lambda line: None)
    assert len(entries) == 2 and entries[0]["test_accuracy"] >= entries[1]["test_accuracy"]
    for entry in entries:
        folder = pathlib.Path(tmp_path) / f"trial-{entry['trial']:04d}"
        [claim] = read_json(folder, "privacy.json")["claims"]
        said = "\n".join(claim["not_private"])
        assert "the choice of this run among the 2 or more of a sweep" in said
        assert "which Optuna chose by the results of other runs" in said
        # Also of a run that it did not end.
        assert f"which {HALVING} decided" in said


@slow
def test_a_regression_is_searched_by_its_own_metric(tmp_path):
    """A metric that no run has is refused before one begins, and leaves a folder for another."""
    rng = np.random.default_rng(0)
    rows = [f"{x},{2 * x + 1}" for x in rng.normal(size=60)]
    (tmp_path / "line.csv").write_text("\n".join(["x,y", *rows]), encoding="utf-8")
    table = f"{{path = '{tmp_path / 'line.csv'}', label = 'y', task = 'regression'}}"
    words = (*SMALL, "--data.name=table", f"--data.options={table}", "--privacy.unit=none")
    words += ("--model.name=linear_regression", "--algorithm.name=fedavg", '--run.metrics=["mae"]')
    words += ("--data.partition=iid", "--execution.devices=1")
    plan = Plan({RATE: Span(0.01, 0.5)}, trials=2)
    quiet = {"words": words, "report": lambda line: None}
    with pytest.raises(ValueError, match=r"^--metric must be one of .*test_mae.* 'test_accuracy'"):
        search(STUDY, plan, tmp_path / "found", **quiet)
    assert not list((tmp_path / "found").glob("trial-*"))
    entries = search(STUDY, plan._replace(metric="test_mae"), tmp_path / "found", **quiet)
    errors = [
        read_json(tmp_path / "found" / f"trial-{e['trial']:04d}", "summary.json")["test_mae"]
        for e in entries
    ]
    assert errors == [e["test_mae"] for e in entries] and errors[0] < errors[1]


@pytest.mark.parametrize("how", ["cut", "middle", "flip", "empty", "rubbish"])
def test_a_damaged_journal_is_read_up_to_its_first_damaged_line(tmp_path, how):
    path, warned = tmp_path / "optuna.journal", []

    def study():
        module._repair(path, warned.append)
        return module._Stored(str(tmp_path), None, "test_accuracy").opened()

    first = study()
    for i in range(5):
        trial = first.ask()
        trial.suggest_float("x", 0, 1)
        first.tell(trial, float(i))
    assert [t.value for t in study().get_trials()] == [0, 1, 2, 3, 4] and not warned
    lines = path.read_bytes().splitlines(keepends=True)
    place = len(lines) // 2
    harmed = {
        "cut": [*lines[:-1], lines[-1][:-5]],
        "middle": [*lines[:place], lines[place][:-9] + b"\n", *lines[place + 1 :]],
        "flip": [*lines[:place], lines[place].replace(b"1", b"2"), *lines[place + 1 :]],
        "empty": [*lines[:place], b"\n", *lines[place + 1 :]],
        "rubbish": [*lines, b"\xff\n"],
    }[how]
    assert harmed != lines
    path.write_bytes(b"".join(harmed))
    left = study()
    (text,) = warned
    number = {"cut": len(lines), "rubbish": len(lines) + 1}.get(how, place + 1)
    assert text.startswith(f"{path}, line {number}, is damaged")
    values = [t.value for t in left.get_trials() if t.value is not None]
    assert values == [0, 1, 2, 3, 4][: len(values)] and (len(values) >= 4) == (number > place + 1)
    assert (tmp_path / "optuna.journal.damaged").read_bytes() == b"".join(harmed)
    # What is written now is not behind what was cut off.
    left.tell(left.ask(), 9.0)
    assert study().get_trials()[-1].value == 9.0 and len(warned) == 1


def test_a_search_whose_journal_was_damaged_has_the_same_points(played, tmp_path):
    plan = PLAN._replace(trials=6)
    whole = search(STUDY, plan, tmp_path, report=lambda text: None)
    path = tmp_path / "optuna.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    for count in range(3, len(lines), 20):
        path.write_bytes(b"".join(lines[:count]) + lines[count][:9])
        warned = []
        assert search(STUDY, plan, tmp_path, report=warned.append) == whole, count
        assert sum("is damaged" in text for text in warned) == 1
