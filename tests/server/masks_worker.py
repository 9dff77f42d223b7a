"""Runs masked rounds on eight CPU devices; a process of its own, see `devices_worker`."""

import sys

import jax
import numpy as np
from test_secure_aggregation import LOST, engine_round, fates_of


def main(output: str) -> None:
    """Saves the sums and the number of drop-outs whose masks were removed."""
    assert len(jax.devices()) == 8
    arrays = {}
    for bits in (32, 64):
        info = engine_round("masked", 4, 1, bits, devices=8)(fates_of(LOST))
        arrays[f"{bits}/total"] = info.server["total"]
        arrays[f"{bits}/num_recovered"] = info.aggregator["num_recovered"]
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
