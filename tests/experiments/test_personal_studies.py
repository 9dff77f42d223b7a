"""The studies of personalisation: every point can be built, and finds the paper's number."""

import pytest

from experiments.personalization.study import STUDIES
from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment.sweep import points


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_of_a_study_is_a_configuration(name):
    study = STUDIES[name]
    for point in points(study, {"seed": ["0"]}, []):
        config = configuration.load(study.file, point.words)
        assert config.participation.cohort_size == 5
        assert config.run.seed == 0


def test_points_find_the_papers_numbers():
    of = {
        name: study.published("worst_client_accuracy", {"method": method, "data": data})
        for name, study, method, data in (
            ("4.1", STUDIES["table_4_1"], "FedLTN(0.9)", "CIFAR-10"),
            ("tiny", STUDIES["table_4_1"], "FedLTN(0.9;jumpstart)", "TinyImageNet"),
            ("4.3", STUDIES["many"], "LotteryFL(0.1)", "CIFAR-10"),
            ("0.5", STUDIES["mixtures"], "FedLTN(0.9)", "CIFAR-10 α=0.5"),
            ("0.7", STUDIES["table_4_4"], "FedLTN(0.9)", "CIFAR-10 α=0.7"),
            ("none", STUDIES["two_classes"], "Ditto", "CIFAR-10"),
        )
    }
    expected = {"4.1": 63.0, "tiny": 61.8, "4.3": 47.5, "0.5": 40.0, "0.7": 36.0, "none": None}
    assert of == expected
