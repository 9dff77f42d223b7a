"""Opacus's private steps, loaders and accountants, as functions of arrays."""

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

LAYERS = (6, 2)
RECORDS = 32
BATCH = 4


class Linear(nn.Module):
    """Layers whose outputs are added: the gradient of a record is the record."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in LAYERS)

    def forward(self, records):
        parts = torch.split(records, LAYERS, dim=1)
        return sum(layer(part) for layer, part in zip(self.layers, parts, strict=True))[:, 0]


class Training:
    """A model, an optimizer and a loader, as `make_private` returns them."""

    def __init__(self, records, *, clipping="flat", accountant="prv", poisson=True):
        model = Linear()
        self.noise = torch.Generator()
        loader = DataLoader(TensorDataset(records), batch_size=BATCH, shuffle=True)
        self.engine = PrivacyEngine(accountant=accountant)
        norm = [2**-0.5] * len(LAYERS) if clipping == "per_layer" else 1.0
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=norm,
            clipping=clipping,
            noise_generator=self.noise,
            poisson_sampling=poisson,
        )

    def step(self, records):
        """One step from zeros; returns the gradient that it took."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.optimizer.zero_grad()
        self.model(records).mean().backward()
        self.optimizer.step()
        moved = [p.detach().numpy().ravel() for p in self.model.parameters()]
        return -np.concatenate(moved)


_TRAININGS = {}


def _step(clipping, records, seed):
    if clipping not in _TRAININGS:
        _TRAININGS[clipping] = Training(torch.zeros(RECORDS, sum(LAYERS)), clipping=clipping)
    training = _TRAININGS[clipping]
    training.noise.manual_seed(seed)
    return training.step(torch.from_numpy(records))


def step(records, seed):
    return _step("flat", records, seed)


def step_per_layer(records, seed):
    return _step("per_layer", records, seed)


def _drawn(poisson, rounds, seed):
    torch.manual_seed(seed)
    numbers = torch.arange(RECORDS, dtype=torch.float32)[:, None]
    training = Training(numbers.expand(RECORDS, sum(LAYERS)), poisson=poisson)
    batches = []
    while len(batches) < rounds:
        batches += [batch[0][:, 0].numpy().astype(int) for batch in training.loader]
    return batches[:rounds]


def poisson_loader(rounds, seed):
    return _drawn(True, rounds, seed)


def shuffled_loader(rounds, seed):
    return _drawn(False, rounds, seed)


def run(contributions, seed):
    """Two steps of a training, each on a batch of its loader."""
    torch.manual_seed(seed)
    training = Training(torch.from_numpy(contributions))
    training.noise.manual_seed(seed)
    steps = [training.step(batch) for _, (batch,) in zip(range(2), training.loader, strict=False)]
    return np.stack(steps)


def _epsilon(accountant, rounds, dp_delta):
    training = Training(torch.zeros(RECORDS, sum(LAYERS)), accountant=accountant)
    history = training.engine.accountant.history
    history.append((1.0, 0.05, rounds))
    return training.engine.get_epsilon(dp_delta)


def epsilon_prv(rounds, dp_delta):
    return _epsilon("prv", rounds, dp_delta)


def epsilon_rdp(rounds, dp_delta):
    return _epsilon("rdp", rounds, dp_delta)


def epsilon_gdp(rounds, dp_delta):
    return _epsilon("gdp", rounds, dp_delta)
