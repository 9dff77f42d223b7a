"""Writes the digits as tables of four participants: python prepare.py FOLDER."""

import pathlib
import sys

import numpy as np
from sklearn.datasets import load_digits

NODES, CLIENTS, TEST = 4, 25, 360

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
x, y = load_digits(return_X_y=True)
rows = [",".join(f"{pixel / 16:g}" for pixel in image) + f",{y[i]}" for i, image in enumerate(x)]
rows = np.random.default_rng(0).permutation(rows)
columns = ",".join(["client", *(f"p{i}" for i in range(64)), "digit"])


def write(name, rows_of):
    lines = [f"{client},{row}" for client, rows in rows_of.items() for row in rows]
    (folder / name).write_text("\n".join([columns, *lines, ""]))


parts = dict(enumerate(np.array_split(rows[TEST:], NODES * CLIENTS)))
for node in range(NODES):
    own = range(node * CLIENTS, (node + 1) * CLIENTS)
    write(f"node-{node}.csv", {client: parts[client] for client in own})
write("public.csv", {NODES * CLIENTS: rows[:TEST]})
