"""Runs a problem through pfl-research: `SimulatedBackend` with its PyTorch model adapter."""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from problem import Params, Problem
from torch_models import DEVICE, WithLoss, delta_of, exactly, finish, inputs, network, reset


class Pfl:
    def __init__(self, problem: Problem):
        self.problem = problem
        x, y = problem.in_order()
        per_client = problem.num_steps * problem.batch_size
        self.x = inputs(x.reshape(problem.num_clients, per_client, *x.shape[3:]))
        self.y = torch.from_numpy(y.reshape(problem.num_clients, per_client)).long().to(DEVICE)
        self.network = network(problem)
        self.model = PyTorchModel(
            WithLoss(self.network),
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.network.parameters(), lr=1.0),
        )

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        problem = self.problem
        users = {i: (self.x[i], self.y[i]) for i in range(num_clients)}
        datasets = {i: Dataset(data, user_id=str(i)) for i, data in users.items()}
        population = FederatedDataset(
            datasets.__getitem__, get_user_sampler("minimize_reuse", list(users))
        )
        postprocessors = []
        if problem.unit == "client":
            gaussian = GaussianMechanism(problem.clip_norm, noise_multiplier)
            postprocessors.append(CentrallyAppliedPrivacyMechanism(gaussian))
        backend = SimulatedBackend(population, population, postprocessors=postprocessors)
        reset(self.network, problem)
        algorithm = FederatedAveraging()
        # Evaluation happens in round 0 and every so many after it: round 1 has none.
        algorithm._current_central_iteration = 1
        rounds = NNAlgorithmParams(
            central_num_iterations=2,
            evaluation_frequency=1000,
            train_cohort_size=num_clients,
            val_cohort_size=0,
        )
        local = NNTrainHyperParams(
            local_num_epochs=None,
            local_learning_rate=problem.learning_rate,
            local_batch_size=problem.batch_size,
            local_num_steps=num_steps,
        )
        started = time.perf_counter()
        algorithm.run(rounds, backend, self.model, local, send_metrics_to_platform=False)
        finish()
        seconds = time.perf_counter() - started
        return seconds, delta_of(self.network, problem)


def main() -> None:
    session = Session("pfl", "torch")
    session.serve(Pfl(session.problem).run, exactly)


if __name__ == "__main__":
    main()
