"""Fair objectives on a skewed MNIST: `python -m experiments.generalization.fairness`.

What has run is left out, and what was stopped continues. Every client counts once in the figures:
the mean over clients, the worst client, and the mean of the worst tenth of them.
"""

import pathlib
import sys

from experiments import sweep
from experiments.sweep import Study

HERE = pathlib.Path(__file__).parent
# With γ of AFL, t of TERM, q of q-FFL, M of PropFair.
OBJECTIVES = {
    "FedAvg": ["--algorithm.name=fedavg"],
    "AFL 0.01": ["--algorithm.name=afl", "--algorithm.options.step_size=0.01"],
    "AFL 0.1": ["--algorithm.name=afl", "--algorithm.options.step_size=0.1"],
    "TERM 1": ["--algorithm.name=term", "--algorithm.options.tilt=1.0"],
    "TERM 5": ["--algorithm.name=term", "--algorithm.options.tilt=5.0"],
    "q-FFL 0.1": ["--algorithm.name=q_ffl", "--algorithm.options.q=0.1"],
    "q-FFL 1": ["--algorithm.name=q_ffl", "--algorithm.options.q=1.0"],
    # Slopes are 1 / (M − ℓ): M times the rate, so that small losses are learnt as fast.
    "PropFair 3": [
        "--algorithm.name=propfair",
        "--algorithm.options.baseline=3.0",
        "--training.learning_rate=0.15",
    ],
    "PropFair 5": [
        "--algorithm.name=propfair",
        "--algorithm.options.baseline=5.0",
        "--training.learning_rate=0.25",
    ],
}
STUDY = Study(
    name="fairness",
    file=HERE / "skewed_mnist.toml",
    axes={
        "objective": OBJECTIVES,
        "data": {"skewed": []},
        "seed": {str(seed): [f"--run.seed={seed}"] for seed in range(3)},
    },
    rows="objective",
    columns="data",
    metrics={
        "test_accuracy": 100.0,
        "mean_client_accuracy": 100.0,
        "worst_client_accuracy": 100.0,
        "worst_tenth_accuracy": 100.0,
        "std_client_accuracy": 100.0,
    },
)

if __name__ == "__main__":
    sweep.main(STUDY, sys.argv[1:])
