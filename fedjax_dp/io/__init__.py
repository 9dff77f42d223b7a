"""What a run leaves on disk: checkpoints, metrics, pictures."""

from fedjax_dp.io.checkpoint import Checkpoints
from fedjax_dp.io.client_plots import client_accuracies, labels_by_client
from fedjax_dp.io.logbook import Logbook, read_metrics, write_json
from fedjax_dp.io.plots import accuracy_and_epsilon, accuracy_by_megabytes

__all__ = [
    "Checkpoints",
    "Logbook",
    "accuracy_and_epsilon",
    "accuracy_by_megabytes",
    "client_accuracies",
    "labels_by_client",
    "read_metrics",
    "write_json",
]
