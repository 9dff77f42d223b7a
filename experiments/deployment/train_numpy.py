"""Trains one client with NumPy: python train_numpy.py MODEL TABLE CLIENT TRAINED; prints scores."""

import json
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 4, 0.5

model, table, client, trained = sys.argv[1:]
rows = np.loadtxt(table, np.float32, delimiter=",", skiprows=1)
rows = rows[rows[:, 0] == int(client)]
x, y = rows[:, 1:-1], rows[:, -1].astype(int)
arrays = load_file(model)
kernel, bias = (arrays[f"params/Dense_0/{name}"] for name in ("kernel", "bias"))
scores = {"accuracy": float(np.mean(np.argmax(x @ kernel + bias, 1) == y))}

for _ in range(EPOCHS):
    order = np.random.default_rng().permutation(len(y))
    for batch in np.array_split(order, -(-len(y) // BATCH_SIZE)):
        logits = x[batch] @ kernel + bias
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(batch)), y[batch]] -= 1
        kernel -= LEARNING_RATE * x[batch].T @ error / len(batch)
        bias -= LEARNING_RATE * error.mean(0)

save_file({"params/Dense_0/kernel": kernel, "params/Dense_0/bias": bias}, trained)
print(json.dumps(scores))
