"""What is evaluated beside held-out data of models as clients receive them."""

import numpy as np
import pytest
from marks import telling
from run_folders import DRAWN, SMALL, die_and_resume, execute, metrics, read_json, saved_arrays

from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.loading import load_run

BOTH = ("--evaluation.personal=after_local", "--evaluation.training=true", "--run.metrics=['f1']")


def test_without_test_data_of_clients_nothing_can_be_evaluated_after_local_training():
    words = (*SMALL, "--data.client_test_share=0", "--evaluation.personal=after_local")
    with pytest.raises(
        ValueError, match=r"evaluation\.personal must be 'received' .* got 'after_local'"
    ):
        assemble(load_config(None, words))


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_nothing_of_it_is_kept_and_a_resumed_run_finds_the_same(tmp_path):
    """Under privacy of clients and records, with noise everywhere."""
    short = (*DRAWN, "--run.rounds=4", "--run.checkpoint_every=2")
    plain, both, resumed = (tmp_path / name for name in ("plain", "both", "resumed"))
    execute(plain, *short)
    execute(both, *short, *BOTH)
    die_and_resume(resumed, 3, *short, *BOTH)
    (_, arrays, extra), (_, others, other_extra) = map(saved_arrays, (plain, both))
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert np.asarray(array).tobytes() == np.asarray(others[name]).tobytes(), name
    assert extra["ledgers"] == other_extra["ledgers"]
    assert read_json(plain, "privacy.json") == read_json(both, "privacy.json")
    rows, more = metrics(plain), metrics(both)
    added = {name for name in more[-1] if name not in rows[-1]}
    assert {
        *("mean_client_accuracy_after_local", "worst_client_accuracy_after_local"),
        *("client_test_f1_after_local", "training_set_accuracy", "training_set_f1"),
    } <= added
    assert [
        {k: row[k] for k in row if k not in added and not k.endswith("_f1")} for row in more
    ] == rows
    assert metrics(resumed) == more
    summary = read_json(both, "summary.json")
    assert added <= set(summary["not_private"])
    assert summary["client_test_accuracy_after_local"] != summary["client_test_accuracy"]
    run = load_run(both)
    train, params = run.experiment.population.train, run.params["params"]["Dense_0"]
    x, y = (np.asarray(train.examples[name]) for name in ("x", "y"))
    logits = x.reshape(len(y), -1) @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    assert summary["training_set_accuracy"] == pytest.approx(np.mean(logits.argmax(-1) == y))
