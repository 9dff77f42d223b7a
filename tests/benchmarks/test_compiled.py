"""Rounds compiled for devices that are not here: the command continues, the yardstick is honest."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from marks import slow

from benchmarks.compiled import __main__ as command
from benchmarks.compiled import by_hand
from benchmarks.compiled.by_hand import has_method, rounds_by_hand, widths
from benchmarks.compiled.page import RESULTS, page
from fedjax_dp.engine import simulation
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

# Full batches and full participation: nothing is drawn, so that two programs compute the same.
SMALL = WORKLOADS["W4"]._replace(
    shape=(5,), num_classes=3, num_clients=6, examples_per_client=4, batch_size=4, num_steps=2
)
CASES = {
    "fedavg": SMALL,
    "gma": SMALL._replace(is_masked=True),
    "fedadam": SMALL._replace(
        algorithm="fedadam", options={"server_learning_rate": 0.1, "adaptivity": 0.01}
    ),
    "fedbn": SMALL._replace(
        model="mlp", algorithm="fedbn", options={"home": "params/Dense_1"}, num_classes=3
    ),
    **{
        name: SMALL._replace(algorithm=name)
        for name in ("propfair", "term", "q_ffl", "ditto", "fedsplit", "fedpi")
    },
}


def stored():
    text = (RESULTS / "compiled.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_page_is_that_of_the_lines():
    rows = stored()
    keys = [(row["workload"], row["program"], row["target"]) for row in rows]
    assert len(set(keys)) == len(keys) and set(keys) <= set(command.pairs())
    assert (RESULTS / "compiled.md").read_text(encoding="utf-8") == page(rows)


def test_figures_from_before_are_of_whole_cohorts():
    before = json.loads((RESULTS / "compiled_before.json").read_text(encoding="utf-8"))
    del before["commit"]
    for name, was in before.items():
        cohort = WORKLOADS[name].cohort or WORKLOADS[name].num_clients
        # That of W4dp was a whole round from the start.
        assert was["passes"] == (1 if name == "W4dp" else -(-cohort // was["clients"])), name
    # 16 passes of 15.4 Mcycles, each of 25 clients.
    assert "| P2 | 25 |  |  | 246 |  |  | 1,442 |" in page([])


def row(pair, **more):
    costs = {"operations": 10.0, "GB": 1.0, "GFLOP": 1.0, "Mcycles": 1.0, "µs": 1.0}
    found = {**pair._asdict(), "jax": "0.11.2", "clients_per_chunk": 5, "passes": {"round": 1.0}}
    found |= {"costs": {"round": costs}, "collectives": {}, "round_seconds": 0.5, "fits": True}
    numbers = ("trace_s", "compile_s", "arguments_MB", "temporaries_MB")
    return found | dict.fromkeys(numbers, 2.0) | more


def test_a_ratio_on_the_page_is_ours_by_the_one_by_hand_at_equal_precision():
    pairs = [command.Pair("W3", program, "v5e") for program in command._PROGRAMS]
    seconds = {"ours": 0.6, "by hand": 0.25, "by hand, exact": 0.5}
    text = page([row(pair, round_seconds=seconds[pair.program]) for pair in pairs])
    assert "| W3 | 5 | 5 | 600 | 500 | 1.20 | 2 | 2 | 1.00 |" in text
    assert "| W3, default precision |  | 5 |  | 250 |" in text


def test_the_command_continues_and_measures_again_what_is_asked(tmp_path, monkeypatch, capsys):
    asked = []

    def compiled(pair):
        asked.append(pair)
        if pair.target == "h100":
            return row(pair)
        return command._failed(pair, "RESOURCE_EXHAUSTED") | {"fits": pair.target != "v6e"}

    monkeypatch.setattr(command, "_compiled", compiled)
    monkeypatch.setattr(command.metadata, "version", lambda name: "0.11.2")
    words = ["--output", str(tmp_path), "--only", "W2", "by hand", "h100", "v5e", "v6e"]
    with pytest.raises(SystemExit, match="failed: W2, by hand, v5e"):
        command.main(words)
    pairs = [command.Pair("W2", "by hand", target) for target in ("h100", "v5e", "v6e")]
    assert sorted(asked) == sorted(pairs)
    # What failed is left, what does not fit is a result.
    with pytest.raises(SystemExit, match="failed"):
        command.main(words)
    assert asked[3:] == [pairs[1]]
    command.main([*words[:4], "by hand", "h100", "--again"])
    assert asked[4:] == [pairs[0]]
    lines = (tmp_path / "compiled.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["target"] for line in lines] == ["h100", "v5e", "v6e"]
    assert "does not fit" in (tmp_path / "compiled.md").read_text(encoding="utf-8")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command.main(["--only", "W99"])
    assert "'W99' is none of" in capsys.readouterr().err


def test_all_workloads_have_programs_and_what_is_not_by_hand_is_known():
    assert {pair.workload for pair in command.pairs()} == set(WORKLOADS)
    missing = {name for name in WORKLOADS if not has_method(WORKLOADS[name])}
    assert missing == {
        *("W1afl", "W1anderson", "W1masked", "W1masked64", "W1cancelled", "W1clock"),
        *("W1fed_ltn", "W1fed_ltn_prunes"),
    }


@slow
@pytest.mark.parametrize("name", CASES)
def test_rounds_by_hand_compute_what_ours_do(name):
    parts, key = prepare(CASES[name]), jax.random.key(3)
    compiled = simulation(parts.algorithm, parts.data, parts.participation)
    state = compiled.init(key)
    params = jax.tree.map(np.asarray, state.server.params)
    examples = {
        field: np.reshape(values, (6, 4, *values.shape[1:]))
        for field, values in parts.data.examples.items()
    }
    state, *_ = compiled.run(state, key, 3)
    expected = state.server.params
    if name == "fedbn":
        expected = by_hand._without_local(expected, CASES[name])
    expected = jax.tree.map(np.asarray, expected)
    assert widths(CASES[name]) == [6, 1]
    for width in (6, 2):
        written = rounds_by_hand(CASES[name], parts, width)
        server, _ = jax.jit(written.rounds)(written.start(params), examples, key, 3)
        found = server[0] if isinstance(server, tuple) else server
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, expected)
