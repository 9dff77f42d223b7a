"""Clients that never take part: who they are, what they change (nothing), and their figures."""

import dataclasses
import re

import numpy as np
import pytest
from marks import slow, telling
from run_folders import (
    DRAWN,
    NOT_PRIVATE,
    SMALL,
    die_and_resume,
    execute,
    metrics,
    read_json,
    saved_arrays,
)

from fedjax_dp.data import FederatedData
from fedjax_dp.data.datasets import Dataset
from fedjax_dp.experiment.assembly.assemble import assemble, checked_config, population_of
from fedjax_dp.experiment.assembly.own_data import require_own_data
from fedjax_dp.experiment.assembly.population import population_from
from fedjax_dp.experiment.components.numbers_by_client import names_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.loading import load_run
from fedjax_dp.experiment.running.report import report
from fedjax_dp.experiment.schema.config import DataSection
from fedjax_dp.experiment.studies.audits import _plant

SIX = ("--data.num_clients=6", "--run.rounds=2")
PARTS = "train", "validation", "client_test", "test"


def own_data(but=()):
    """Natural clients with test examples of their own, with those of `but` left out."""
    owner = np.array(list("bacdacbde") * 8)
    tested = np.array(list("abcde") * 4)
    x = np.arange(len(owner) * 2, dtype=np.float32).reshape(-1, 2)
    parts = [
        {"x": x[: len(who)] + shift, "y": np.arange(len(who)) % 3}
        for who, shift in ((owner, 0), (tested, 1000))
    ]
    kept = [~np.isin(who, list(but)) for who in (owner, tested)]
    train, test = ({k: v[own] for k, v in p.items()} for p, own in zip(parts, kept, strict=True))
    clients = owner[kept[0]], tested[kept[1]]
    return Dataset("own", train, test, 3, "classification", *clients)


def same(one, two):
    """Whether two parts of data have the same bits."""
    if one is None or two is None:
        return one is two
    arrays = [(one.offsets, two.offsets), *((x, two.examples[n]) for n, x in one.examples.items())]
    bits = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in arrays)
    return bits and one.client_names == two.client_names


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"client_test_share": 0.3, "stratified": True, "client_validation_share": 0.2},
        {"public_examples": 7},
    ],
)
def test_the_others_have_the_data_of_a_run_without_them(section):
    """Natural clients: to the bit those of a data set that never had the records."""
    base = DataSection(name="digits", partition="natural", **section)
    named = DataSection(name="digits", partition="natural", unseen_clients=["d", "b"], **section)
    found = population_from(own_data(), named, 5)
    without = population_from(own_data(but="bd"), base, 5)
    assert all(same(getattr(found, part), getattr(without, part)) for part in PARTS)
    assert (found.notes, found.chosen) == (without.notes, without.chosen)
    if section.get("public_examples"):
        np.testing.assert_array_equal(found.public_x, without.public_x)
    # All that the two have, for training and for tests.
    assert found.unseen.client_names == ("b", "d")
    pool = own_data()
    for i, name in enumerate("bd"):
        rows = [
            part["x"][who == name]
            for part, who in ((pool.train, pool.train_clients), (pool.test, pool.test_clients))
        ]
        np.testing.assert_array_equal(found.unseen.client(i)["x"], np.concatenate(rows))


def test_the_share_is_drawn_by_the_seed_and_clients_keep_their_numbers():
    share = "--data.unseen_client_share=0.3"
    whole, apart = (population_of(load_config(None, (*SIX, *more))) for more in ((), (share,)))
    assert apart.unseen.num_clients == 2 and apart.train.num_clients == 4
    numbers = sorted(map(int, (*apart.train.client_names, *apart.unseen.client_names)))
    assert numbers == list(range(6))
    # What an unseen client holds is all that it would hold as one that trains.
    for i, name in enumerate(apart.unseen.client_names):
        mine = np.concatenate([p.client(int(name))["x"] for p in (whole.train, whole.client_test)])
        assert sorted(map(bytes, apart.unseen.client(i)["x"])) == sorted(map(bytes, mine))
    again = population_of(load_config(None, (*SIX, share)))
    assert same(again.unseen, apart.unseen)
    seeds = {
        population_of(load_config(None, (*SIX, share, f"--run.seed={s}"))).unseen.client_names
        for s in range(6)
    }
    assert len(seeds) > 1
    by_name = f"--data.unseen_clients={list(apart.unseen.client_names)}"
    assert same(population_of(load_config(None, (*SIX, by_name))).unseen, apart.unseen)


def test_clients_with_parts_of_their_own_are_held_out_whole():
    sizes = "{train_per_class = 5, validation_per_client = 3, test_per_client = 8}"
    words = (*SIX, "--data.partition=few_classes", f"--data.partition_options={sizes}")
    whole = population_of(load_config(None, words))
    apart = population_of(load_config(None, (*words, "--data.unseen_clients=['4', '1']")))
    for part in ("train", "validation", "client_test"):
        found = getattr(apart, part)
        others = getattr(whole, part).select([0, 2, 3, 5])
        assert same(found, dataclasses.replace(others, client_names=("0", "2", "3", "5")))
    parts = whole.train, whole.validation, whole.client_test
    for i, client in enumerate((1, 4)):
        mine = np.concatenate([part.client(client)["x"] for part in parts])
        np.testing.assert_array_equal(apart.unseen.client(i)["x"], mine)


def test_numbers_by_client_are_those_of_clients_that_train():
    """By name without them, in lists without them, and in published lists for the others."""
    table = "--privacy.record.epsilon={'0' = 1, '2' = 2, '3' = 3}"
    words = ("--data.num_clients=4", "--data.unseen_clients=['1']")
    experiment = assemble(load_config(None, (*words, table)))
    assert names_of(experiment.population.train) == ("0", "2", "3")
    assert experiment.config.privacy.record.epsilon == [1, 2, 3]
    with pytest.raises(ValueError, match=r"epsilon must be one number or .* the 3 clients"):
        checked_config(load_config(None, (*words, "--privacy.record.epsilon=[1, 2, 3, 4]")))
    published = ("--data.num_clients=25", "--data.unseen_client_share=0.2")
    config = checked_config(load_config(None, (*published, "--privacy.record.epsilon=Dist1")))
    assert len(config.privacy.record.epsilon) == 20


@pytest.mark.parametrize("form", [FederatedData.save, FederatedData.save_zarr])
def test_examples_on_disk_stay_there(tmp_path, form):
    pool = own_data()
    form(FederatedData.from_client_ids(pool.train, pool.train_clients), tmp_path / "store")
    words = ("--data.name=store", "--data.partition=natural", "--data.options.num_classes=3")
    words += (f"--data.options.path={tmp_path / 'store'}", "--data.unseen_clients=['b', 'e']")
    found = population_of(load_config(None, words))
    assert found.train.client_names == ("a", "c", "d")
    for i, name in enumerate("be"):
        mine = pool.train["x"][pool.train_clients == name]
        np.testing.assert_array_equal(np.asarray(found.unseen.client(i)["x"]), mine)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--data.unseen_client_share=0.05",),
            "data.unseen_client_share must hold out at least one of the 6 clients, .* got 0.05",
        ),
        (("--data.unseen_client_share=0.95",), "data.unseen_client_share must .* leave at least"),
        (("--data.unseen_client_share=1",), r"data.unseen_client_share must .* got 1"),
        (
            ("--data.unseen_clients=['0', '1', '2', '3', '4', '5']",),
            "data.unseen_clients must .* leave at least one to train",
        ),
        (
            ("--data.unseen_clients=['0', '7']",),
            "data.unseen_clients must name clients of the data, .* got '7'",
        ),
        (("--data.unseen_clients=['0', '0']",), "data.unseen_clients must name each client once"),
        (
            ("--data.unseen_clients=['0']", "--data.unseen_client_share=0.5"),
            "data.unseen_client_share must be 0 with data.unseen_clients, which .* got 0.5",
        ),
        (
            (
                "--data.unseen_clients=['0']",
                "--data.partition=common_pool",
                "--data.partition_options={samples_per_client = 400}",
            ),
            "data.unseen_clients must be left out for a partition that gives a record to several",
        ),
        (
            ("--data.unseen_client_share=0.5", *NOT_PRIVATE[:1], "--algorithm.name=local_only"),
            "data.unseen_client_share must be left out for local_only, which has no server model",
        ),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ValueError, match=message):
        assemble(load_config(None, (*SIX, *words)))


def test_the_data_have_a_seed_of_their_own():
    shares = ("client_test_share=0.3", "client_validation_share=0.2", "unseen_client_share=0.3")
    some = ("max_examples=200", "partition=dirichlet", "name=digits", "num_clients=6", *shares)

    def made(*seeds):
        return population_of(
            load_config(None, [f"--{each}" for each in seeds] + [f"--data.{each}" for each in some])
        )

    first, other = made("run.seed=1"), made("run.seed=0")
    for found in (made("run.seed=0", "data.seed=1"), made("data.seed=1", "run.seed=7")):
        for part in ("train", "validation", "client_test", "unseen"):
            assert same(getattr(found, part), getattr(first, part))
            assert not same(getattr(found, part), getattr(other, part))
    assert same(made("data.seed=0", "run.seed=3").train, other.train), "0 is a seed"


@slow
def test_canaries_join_the_clients_that_train():
    experiment = assemble(load_config(None, (*SIX, "--data.unseen_clients=['4', '1']")))
    planted = _plant(experiment, "record", 3, "made").data
    train, unseen = experiment.population.train, experiment.population.unseen
    assert planted.num_clients == train.num_clients == 4
    attacked, apart = (
        {x.tobytes() for x in np.asarray(d.examples["x"])} for d in (planted, unseen)
    )
    assert attacked == {x.tobytes() for x in train.examples["x"]} and apart - attacked


@pytest.mark.parametrize(
    ("key", "value", "only"), [("unseen_clients", ["a"], []), ("max_examples", 9, None)]
)
def test_nodes_read_all_data_of_their_own(key, value, only):
    words = ("--data.name=table", "--data.partition=natural", "--data.client_test_share=0")
    words += ("--data.options={path = 'a.csv', label = 'y', client = 'who'}",)
    config = load_config(None, (*words, f"--data.{key}={value}"))
    rule = re.escape(f"data.{key} must be {only}, since nodes read")
    with pytest.raises(ValueError, match=rule):
        require_own_data(config)


def write_table(file, but=""):
    rng, lines = np.random.default_rng(3), ["a,b,y,ward"]
    for i, (a, b) in enumerate(rng.uniform(size=(120, 2))):
        ward = "abcd"[i % 4]
        if ward not in but:
            lines.append(f"{a:.6f},{b:.6f},{'yes' if a + b > 1 else 'no'},{ward}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = f"path='{file}', label='y', client='ward', scaling='range'"
    ranges = "ranges={a=[0, 1], b=[0, 1]}"
    return ("--data.name=table", "--data.options={" + f"{options}, {ranges}" + "}")


@telling
@pytest.mark.usefixtures("no_pictures")
def test_a_run_is_that_of_the_other_clients_and_figures_are_those_of_a_forward_pass(tmp_path):
    """Under privacy of clients and records, interrupted or not; beside NumPy."""
    without = write_table(tmp_path / "without.csv", but="bd")
    whole = write_table(tmp_path / "whole.csv")
    words = (*DRAWN[1:], "--run.rounds=4", "--run.checkpoint_every=2", "--run.metrics=['f1']")
    named = (*whole, *words, "--data.unseen_clients=['b', 'd']")
    plain, apart, resumed = (tmp_path / name for name in ("plain", "apart", "resumed"))
    assert execute(plain, *without, *words)[0] == 0
    assert execute(apart, *named)[0] == 0
    die_and_resume(resumed, 3, *named)
    (_, arrays, extra), (_, others, other_extra) = map(saved_arrays, (plain, apart))
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert np.asarray(array).tobytes() == np.asarray(others[name]).tobytes(), name
    assert extra["ledgers"] == other_extra["ledgers"]
    rows, more = metrics(plain), metrics(apart)
    kept = [{k: v for k, v in row.items() if not k.startswith("unseen_")} for row in more]
    assert kept == rows and metrics(resumed) == more
    summary = read_json(apart, "summary.json")
    assert (summary["num_clients"], summary["num_unseen_clients"]) == (2, 2)
    run = load_run(apart)
    unseen, params = run.experiment.population.unseen, run.params["params"]["Dense_0"]
    losses, hits = [], []
    for i in range(2):
        x, y = (np.asarray(unseen.client(i)[name], np.float64) for name in ("x", "y"))
        logits = x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"])
        scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.append(-scores[np.arange(len(y)), y.astype(int)])
        hits.append(scores.argmax(axis=1) == y)
    assert [len(each) for each in hits] == [30, 30]
    means = [float(each.mean()) for each in hits]
    expected = {
        "unseen_loss": np.concatenate(losses).mean(),
        "unseen_accuracy": np.concatenate(hits).mean(),
        "unseen_mean_client_accuracy": np.mean(means),
        "unseen_worst_client_accuracy": min(means),
        "unseen_worst_tenth_accuracy": min(means),
        "unseen_worst_client_loss": max(each.mean() for each in losses),
        "unseen_accuracy_disparity": max(means) - min(means),
    }
    assert {k: summary[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    assert "unseen_f1" in summary
    assert {name for name in summary if name.startswith("unseen_")} <= set(summary["not_private"])
    text = (apart / "partition.txt").read_text("utf-8")
    assert "never take part, and are not in these figures: b, d" in text
    stated = read_json(apart, "privacy.json")
    sentence = "the 60 records of 2 clients that never took part"
    assert all(any(sentence in x for x in claim["not_private"]) for claim in stated["claims"])
    page = report(apart, tmp_path / "page.html").file.read_text("utf-8")
    assert "accuracy at clients that never took part" in page and "never took part</th>" in page


@telling
@pytest.mark.usefixtures("no_pictures")
def test_a_release_has_none_of_their_figures(tmp_path):
    words = (*SMALL, "--run.secret=true", "--run.release=private", "--data.unseen_clients=['1']")
    assert execute(tmp_path / "run", *words)[0] == 0
    assert "unseen_accuracy" in read_json(tmp_path / "run", "summary.json")
    released = read_json(tmp_path / "run" / "release", "summary.json")
    assert not any(name.startswith("unseen_") for name in released)
