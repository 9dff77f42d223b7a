"""Digests of every case after three rounds: `bits.py write FILE`, `bits.py check FILE [NAME ...]`.

They hold on one machine with one version of JAX, so that no test of the suite reads them.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile

MODES = ("one device", "two devices", "streamed", "disk")


def digest(tree) -> str:
    """SHA-256 over the leaves in order: type, shape and bytes."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def execution(mode: str):
    from fedjax_dp.engine import ExecutionConfig

    return ExecutionConfig(
        clients_per_chunk=2,
        devices=2 if mode == "two devices" else None,
        placement={"streamed": "host", "disk": "disk"}.get(mode, "device"),
        folder=tempfile.mkdtemp() if mode == "disk" else None,
        rounds_per_call=2,
    )


def outcome(case, mode: str) -> dict:
    """Runs a case; whatever is refused is kept as the refusal."""
    import jax
    import numpy as np
    from small_problem import KEY, ROUNDS

    from fedjax_dp.engine import communication
    from fedjax_dp.engine.client_store import ClientStore

    try:
        sim = case.simulation(execution(mode))
    except ValueError as refusal:
        return {"refused": str(refusal)[:60]}
    key = jax.random.key(KEY)
    state, record, info = sim.run(sim.init(key), key, ROUNDS)
    if isinstance(state.clients, ClientStore):
        state = state._replace(clients=state.clients.many(range(len(sim.sizes))))
    state = jax.tree.map(np.array, sim.portable(state) if mode != "disk" else state)
    sent = communication(sim, record, info)
    return {
        "state": digest(state),
        "record": digest(record),
        "info": digest(info._replace(messages=None)),
        "bytes": {way: sent.by_round(way).tolist() for way in ("up", "down")},
    }


def run(modes, names) -> None:
    """Prints one line of JSON for each case and mode."""
    from cases import CASES

    for name in names or CASES:
        for mode in modes:
            print(json.dumps([name, mode, outcome(CASES[name], mode)]), flush=True)


def gathered(names) -> dict:
    """Runs all modes, those of several devices in a process of their own."""
    found: dict = {}
    for modes, flags in (
        (("one device", "streamed", "disk"), ""),
        (("two devices",), "--xla_force_host_platform_device_count=2"),
    ):
        command = [sys.executable, __file__, "run", ",".join(modes), *names]
        environment = {**os.environ, "XLA_FLAGS": flags}
        lines = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
        for name, mode, value in map(json.loads, lines.stdout.splitlines()):
            found.setdefault(name, {})[mode] = value
    return found


def main(what: str, where: str, *names: str) -> None:
    if what == "run":
        run(where.split(","), names)
    elif what == "write":
        with open(where, "w") as file:
            json.dump(gathered(names), file, indent=1, sort_keys=True)
    else:
        with open(where) as file:
            expected = json.load(file)
        found, num_changed = gathered(names), 0
        for name, modes in found.items():
            for mode, parts in modes.items():
                for part, value in parts.items():
                    if value != expected.get(name, {}).get(mode, {}).get(part):
                        num_changed += 1
                        was = expected.get(name, {}).get(mode, {}).get(part)
                        print(f"{name}, {mode}: {part} was {was}, is {value}")
        print(f"{len(found)} cases, {num_changed} differences")
        sys.exit(num_changed > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
