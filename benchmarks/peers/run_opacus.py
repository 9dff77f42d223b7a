"""Runs a problem through Opacus: per-sample gradients by hooks, ghost clipping, or no privacy."""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import time

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from problem import Params, Problem
from torch import nn
from torch_models import DEVICE, arrays_of, exactly, finish, inputs, network, reset

VARIANTS = ("hooks", "ghost", "plain")


class Opacus:
    def __init__(self, problem: Problem, variant: str):
        if variant not in VARIANTS:
            raise ValueError(f"the variant must be one of {VARIANTS}, got {variant!r}")
        self.problem = problem
        x, y = problem.in_order()
        self.x, self.y = inputs(x), torch.from_numpy(y).long().to(DEVICE)
        self.network = network(problem)
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(self.network.parameters(), lr=problem.learning_rate)
        numbers = {
            "noise_multiplier": problem.noise_multiplier,
            "max_grad_norm": problem.clip_norm,
            "expected_batch_size": problem.batch_size,
        }
        if variant == "plain":
            self.module, self.optimizer, self.criterion = self.network, optimizer, criterion
        elif variant == "hooks":
            self.module = GradSampleModule(self.network)
            self.optimizer = DPOptimizer(optimizer, **numbers)
            self.criterion = criterion
        else:
            self.module = GradSampleModuleFastGradientClipping(
                self.network, max_grad_norm=problem.clip_norm, use_ghost_clipping=True
            )
            self.optimizer = DPOptimizerFastGradientClipping(optimizer, **numbers)
            self.criterion = DPLossFastGradientClipping(self.module, self.optimizer, criterion)

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        self.optimizer.noise_multiplier = noise_multiplier
        reset(self.network, self.problem)
        start = [p.detach().clone() for p in self.network.parameters()]
        total = [torch.zeros_like(p) for p in start]
        started = time.perf_counter()
        for client in range(num_clients):
            with torch.no_grad():
                for parameter, value in zip(self.network.parameters(), start, strict=True):
                    parameter.copy_(value)
            for step in range(num_steps):
                self.optimizer.zero_grad()
                outputs = self.module(self.x[client, step])
                self.criterion(outputs, self.y[client, step]).backward()
                self.optimizer.step()
            with torch.no_grad():
                for summed, parameter, value in zip(
                    total, self.network.parameters(), start, strict=True
                ):
                    summed.add_(parameter).sub_(value)
        with torch.no_grad():
            for parameter, value, summed in zip(
                self.network.parameters(), start, total, strict=True
            ):
                parameter.copy_(value + summed / num_clients)
        finish()
        seconds = time.perf_counter() - started
        after = arrays_of(self.network)
        return seconds, {k: after[k] - v for k, v in self.problem.params.items()}


def main() -> None:
    session = Session("opacus", "torch")
    session.serve(Opacus(session.problem, session.variant).run, exactly)


if __name__ == "__main__":
    main()
