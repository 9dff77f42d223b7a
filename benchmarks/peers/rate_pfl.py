"""Measures rounds of pfl-research in several processes on one device: `rate_pfl.py OPTIONS`.

    python benchmarks/peers/rate_pfl.py --processes 5 --rounds 5 --cohort 50 --users 1000

P1: its benchmark of CIFAR-10 with random images, users of 50, batches of 10, one epoch, the
two-layer CNN with dropout. Each process trains its share of a cohort, and they add the updates up.
Prints a line of JSON. Its launchers give each process a GPU of its own and let them talk by NCCL,
which refuses two on one GPU: here they share it, and talk by Gloo.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--private", action="store_true", help="P1dp: clip 0.4, noise 1")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _train(options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    each = {
        "WORLD_SIZE": options.processes, "LOCAL_WORLD_SIZE": options.processes,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "one device",
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // options.processes),
    }  # fmt: skip
    shared = os.environ | {name: str(value) for name, value in each.items()}
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    started = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.processes)
    ]
    codes: list[int | None] = [None]
    try:
        # One that fails leaves the others waiting for it.
        while None in codes and not any(codes):
            time.sleep(0.05)
            codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if failed := [code for code in codes if code]:
        raise SystemExit(f"Error: a process of pfl ended with {failed[0]}")


def _train(options: argparse.Namespace) -> None:
    """Trains as one of the processes; the first prints the result."""
    import importlib.metadata

    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    os.environ["PFL_PYTORCH_DEVICE"] = device
    start, choose = torch.distributed.init_process_group, torch.cuda.set_device
    torch.distributed.init_process_group = lambda backend: start(backend="gloo")
    torch.cuda.set_device = lambda _: choose(0)

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
    from torch_models import EmnistCnn, WithLoss

    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    x = torch.rand((options.users, 50, 3, 32, 32), generator=random)
    y = torch.randint(10, (options.users, 50), generator=random)
    # Here they are as near to the device as ours.
    x, y = x.to(device), y.to(device)
    datasets = [Dataset((x[i], y[i]), user_id=str(i)) for i in range(options.users)]
    sampler = get_user_sampler("minimize_reuse", list(range(options.users)))
    population = FederatedDataset(datasets.__getitem__, sampler)
    noise = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.4, 1.0))]
    network = EmnistCnn(3, 32, 10, dropout=(0.25, 0.5)).to(device)
    model = PyTorchModel(
        WithLoss(network),
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    backend = SimulatedBackend(
        population, population, postprocessors=noise if options.private else []
    )
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10, local_num_steps=None
    )
    seconds = []
    for i in range(options.rounds + 1):
        algorithm = FederatedAveraging()
        # Evaluation happens in round 0 and every so many after it: round 1 has none.
        algorithm._current_central_iteration = 1
        rounds = NNAlgorithmParams(
            central_num_iterations=2,
            evaluation_frequency=1000,
            train_cohort_size=options.cohort,
            val_cohort_size=0,
        )
        started = time.perf_counter()
        algorithm.run(rounds, backend, model, local, send_metrics_to_platform=False)
        if device != "cpu":
            torch.cuda.synchronize()
        # The first also warms up.
        if i > 0:
            seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] != "0":
        return
    median = statistics.median(seconds)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("pfl", "torch"))
    found = {
        "name": "P1dp" if options.private else "P1",
        "implementation": "pfl",
        "processes": options.processes,
        "device": torch.cuda.get_device_name(0) if device != "cpu" else "cpu",
        "cohort": options.cohort,
        "num_clients": options.users,
        "seconds_per_round": median,
        "seconds_per_round_min": min(seconds),
        "seconds_per_round_max": max(seconds),
        "clients_per_second": options.cohort / median,
        "versions": ", ".join(versions),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
