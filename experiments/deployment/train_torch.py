"""Trains the clients of a node with PyTorch: python train_torch.py STATE_DIR TABLE."""

import sys

import numpy as np
import torch

from fedjax_dp.flower import NotOpenError, project

EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 4, 0.5
# The arrays of the model by name. Kernels are [inputs, outputs], in PyTorch [outputs, inputs].
KERNEL, BIAS = "params/Dense_0/kernel", "params/Dense_0/bias"


def load(net, arrays):
    weight, bias = torch.tensor(arrays[KERNEL]).T, torch.tensor(arrays[BIAS])
    net.load_state_dict({"weight": weight, "bias": bias})


def arrays_of(net):
    return {KERNEL: net.weight.detach().T, BIAS: net.bias.detach()}


def accuracy(net, x, y):
    return float((net(x).argmax(1) == y).float().mean())


def train(net, x, y):
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH_SIZE):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()


state_dir, table = sys.argv[1:]
# One column for the client, then the pixels and the digit.
rows = np.loadtxt(table, np.float32, delimiter=",", skiprows=1)
clients, x, y = rows[:, 0], torch.tensor(rows[:, 1:-1]), torch.tensor(rows[:, -1]).long()
net = torch.nn.Linear(x.shape[1], 10)

here = project(state_dir)
# Until the last round, or an hour without one.
while (number := here.wait(timeout=3600)) is not None:
    model = here.pull(number)
    for link in here.datalinks:
        own = clients == link
        load(net, model)
        before = accuracy(net, x[own], y[own])
        train(net, x[own], y[own])
        here.report({"accuracy": before}, number, link)
        try:
            here.push(arrays_of(net), link, number)
        except NotOpenError as late:
            print(late)
    print(f"round {number + 1} of {here.rounds} is trained", flush=True)
