"""A clock by configuration: what is refused, what a run writes, how it resumes."""

import numpy as np
import pytest
from marks import slow, telling
from run_folders import DRAWN, SMALL, assert_same_run, die_and_resume, execute, metrics, read_json

from fedjax_dp.engine import latencies, round_times
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.components.clock import clock_of, with_latencies
from fedjax_dp.experiment.reading import config_files

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")
TABLE = [[0.1, 0.5], [0.75, 0.2]]
PLACES = ("--clock.places=['here', 'there']", "--clock.seconds=[[0.1, 0.5], [0.75, 0.2]]")
ENDS = ("--clock.server=here", "--clock.clients=['there', 'here']")
CLOCK = (*PLACES, *ENDS)
RETURNS = ("clock.availability.return_rounds=2", "clock.availability.return_seconds=2")


def table(folder, text="place, here, there\nhere, 0.1, 0.5\nthere, 0.75, 0.2\n"):
    file = folder / "latencies.csv"
    file.write_text(text, encoding="utf-8")
    return f"--clock.latencies={file}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("clock.deadline=2",), "clock.server must name a place, got None"),
        (CLOCK[:3], "clock.clients must name the place of a client, got []"),
        ((*CLOCK[:2], CLOCK[3]), "clock.server must name a place, got None"),
        ((*CLOCK[:3], "clock.clients=['heer']"), "clock.clients must be one of here, there"),
        (("clock.places=['here', 'here']", *CLOCK[1:]), "clock.places must have different names"),
        (
            (CLOCK[0], "clock.seconds=[[0, 1], [-1, 0]]", *ENDS),
            "clock.seconds must be at least 0 and below 1e+09 for every pair of places, got -1",
        ),
        ((CLOCK[0], "clock.seconds=[[0, 1]]", *ENDS), "clock.seconds must be a table of 2 × 2"),
        (
            (CLOCK[0], "clock.seconds=[[0, 1], [1]]", *ENDS),
            "for every pair of places, got nothing from there to there",
        ),
        (
            (CLOCK[0], 'clock.seconds=[[0, ""], [1, 0]]', *ENDS),
            "for every pair of places, got '' from here to there",
        ),
        ((*CLOCK, "clock.per_step={ a = 1 }"), "clock.classes must be given"),
        ((*CLOCK, "clock.dropout=1"), "clock.dropout must be in [0, 1), got 1"),
        ((*CLOCK, "clock.classes=['a', 'a', 'a', 'a']"), "one entry for each of the 3 clients"),
        (
            (*CLOCK, "clock.availability.first=1"),
            "clock.availability.first must be 0 for one client or more",
        ),
        (
            (*CLOCK, "clock.availability.end=[1, 2]"),
            "clock.availability.end must be one number or have one for each of the 3 clients",
        ),
        (
            (*CLOCK, "clock.availability.hours=[[8, 30]]"),
            "clock.availability.hours must be in [0, 24]",
        ),
        (
            (*CLOCK, "clock.availability.return_rounds=2"),
            "clock.availability.return_rounds must be left out without a chance",
        ),
        (
            (*CLOCK, "clock.availability.hours={ a = [[8, 9]] }"),
            "clock.classes must name the class of each client",
        ),
        (
            (*CLOCK, "clock.availability.hours={ a = [[8, 9]] }", "clock.classes=['b']"),
            "clock.classes must be one of a, got 'b'",
        ),
        (
            (*CLOCK, "clock.availability.chance=0.1", *RETURNS),
            "clock.availability.return_seconds must be left out with",
        ),
        (
            (*CLOCK, "clock.key_rounds=[0]", "data.num_clients=1"),
            "clock.key_rounds must be left out with one client",
        ),
        (
            ("communication.serverless=true", SMALL[0][:-1] + "1", *PLACES, ENDS[1]),
            "communication.serverless must be false under a clock of one client",
        ),
        ((*CLOCK, "communication.serverless=true"), "clock.server must be left out with"),
        ((*CLOCK, "clock.deadline=0.01"), "clock.deadline must be at least 0.2, the shortest"),
        ((*CLOCK, "clock.keep=4"), "clock.keep must be at most the 3 clients that a round"),
        ((*CLOCK, "clock.edges=['here']", "clock.keep=2"), "clock.keep must be left out with edge"),
        (
            (*CLOCK, "clock.availability.hours=[[8, 9]]"),
            "clock.deadline must be given for availability by simulated time",
        ),
        (
            ("communication.serverless=true", *PLACES, ENDS[1], "clock.deadline=9"),
            "clock.deadline must be left out without a server",
        ),
    ],
)
def test_a_bad_clock_is_refused_before_data_are_read(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(population.datasets, "load", None)
    given = [f"--{word.removeprefix('--')}" for word in words]
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *FEDAVG, *given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("place, here\n", "hold a line of places and one for each place"),
        ("place, here, there\nhere, 0, 1\n", "have a line for each place of its first line"),
        ("place, here, there\nhere, 0, 1\nthere, 0\n", "line 3 must have a number for each"),
        ("place, here, there\nhere, 0, 1\nthere, 0, x\n", "line 3 must have a number for each"),
        ("place, here, there\nhere, 0, 1\nthere, , 0\n", "line 3 must have a number for each"),
        ("place, here\nhere, 0\r1\n", "line 2 must be a line of a CSV file"),
    ],
)
def test_a_bad_file_of_latencies_is_refused(tmp_path, text, message):
    config = load_config(None, [*SMALL, *FEDAVG, table(tmp_path, text), *ENDS])
    with pytest.raises(ValueError, match=message):
        with_latencies(config)
    both = load_config(None, [*SMALL, *FEDAVG, table(tmp_path), *CLOCK])
    with pytest.raises(ValueError, match=r"clock.places must be left out with a file"):
        with_latencies(both)


def test_a_file_of_latencies_is_the_same_table_and_is_written_out(tmp_path):
    plain = load_config(None, [*SMALL, *FEDAVG])
    assert "clock" not in config_files.to_toml(plain) and clock_of(plain, 3) is None
    config = with_latencies(load_config(None, [*SMALL, *FEDAVG, table(tmp_path), *ENDS]))
    assert "latencies.csv" not in config_files.to_toml(config)
    clock = clock_of(config, 3)
    clients = ["there", "here", "there"]
    expected = latencies(["here", "there"], TABLE, clients, "here")
    for found, wanted in zip(clock.latencies, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    inline = clock_of(load_config(None, [*SMALL, *FEDAVG, *CLOCK]), 3)
    np.testing.assert_array_equal(inline.latencies.minimum, clock.latencies.minimum)


def test_lists_are_no_number_of_clients_while_it_is_unknown():
    """One place and two classes for all clients, of whom three are listed by their rounds."""
    hours = "--clock.availability.hours={ a = [[8, 9]], b = [[8, 9]] }"
    words = ("--clock.clients=['here']", "--clock.classes=['a', 'b']", "--clock.key_rounds=[0]")
    words += (hours, "--clock.deadline=9", "--clock.availability.first=[0, 0, 1]")
    clock = clock_of(load_config(None, [*SMALL, *FEDAVG, *CLOCK[:3], *words]), None)
    assert len(clock.latencies.clients) == 3 and clock.options["availability"].num_clients == 3


@telling
def test_a_run_with_a_clock_writes_its_seconds_and_pictures(tmp_path):
    """By hand: two clients there, one here; the second agreement on keys is before round 1."""
    words = ("--clock.per_round=2", "--clock.key_rounds=[1]", "--clock.server_seconds=0.5")
    status, text = execute(tmp_path / "run", *SMALL, *FEDAVG, *CLOCK, *words)
    assert status == 0
    one, keys = 0.5 + 2 + 0.75 + 0.5, 2 + 0.75
    rows = metrics(tmp_path / "run")
    np.testing.assert_allclose([row["round_seconds"] for row in rows], [one, one + keys], rtol=1e-6)
    assert read_json(tmp_path / "run", "summary.json")["simulated_seconds"] == 2 * one + keys
    assert f"{2 * one + keys:g} simulated seconds" in text
    for name in ("accuracy_seconds.png", "round.png"):
        assert (tmp_path / "run" / "plots" / name).is_file()


@telling
def test_a_run_without_a_server_counts_its_messages(tmp_path, no_pictures):
    words = ("--communication.serverless=true", *PLACES, ENDS[1], "--clock.per_round=2")
    assert execute(tmp_path / "alone", *SMALL, *FEDAVG, *words)[0] == 0
    assert execute(tmp_path / "served", *SMALL, *FEDAVG)[0] == 0
    rows, served = metrics(tmp_path / "alone"), metrics(tmp_path / "served")
    for row, other in zip(rows, served, strict=True):
        assert row["num_messages"] == 6 and row["bytes_down"] == 0
        assert row["bytes_up"] == 2 * other["bytes_up"]
        assert row["test_accuracy"] == other["test_accuracy"]
        assert row["round_seconds"] == pytest.approx(2.75)


@slow
def test_a_run_with_a_clock_resumes_to_the_same_bits(tmp_path, no_pictures):
    clock = (*CLOCK, "--clock.jitter=0.2", "--clock.deadline=1.6", "--clock.dropout=0.2")
    clock += ("--clock.availability.chance=0.3", "--clock.availability.return_rounds=2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert execute(whole, *DRAWN, *clock)[0] == 0
    die_and_resume(cut, 4, *DRAWN, *clock)
    assert_same_run(whole, cut)
    rows = metrics(whole)
    assert sum(row["num_unreachable"] for row in rows) > 0


def test_the_chart_has_the_times_of_the_round():
    config = load_config(None, [*SMALL, *FEDAVG, *CLOCK, "--clock.per_round=2"])
    clock = clock_of(config, 3)
    times = round_times(clock.latencies, clock.compute)
    np.testing.assert_allclose(times.begin, [0.5, 0.1, 0.5])
    np.testing.assert_allclose(times.send, [2.5, 2.1, 2.5])
