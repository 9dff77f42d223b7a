"""Runs a problem through Flower: its simulation runtime with Ray, PyTorch clients, FedAvg.

As many clients run side by side as there are cores, each with one PyTorch thread. All nodes take
part, since Flower draws which; a smaller cohort is a weight of 0 for the clients beyond it.
"""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import os
import pathlib
import time

# Read on import: nothing is sent anywhere.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from flower_client import client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from problem import Params
from torch_models import delta_of, network

NUM_WORKERS = len(os.sched_getaffinity(0))


def server_app(session: Session) -> ServerApp:
    app = ServerApp()
    problem = session.problem

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        def run(num_clients: int, num_steps: int, noise_multiplier: float) -> tuple[float, Params]:
            module = network(problem)
            strategy = FedAvg(
                fraction_evaluate=0.0,
                min_available_nodes=problem.num_clients,
            )
            if problem.unit == "client":
                strategy = DifferentialPrivacyServerSideFixedClipping(
                    strategy, noise_multiplier, problem.clip_norm, num_clients
                )
            arrays = ArrayRecord(module.state_dict())
            started = time.perf_counter()
            result = strategy.start(
                grid=grid,
                initial_arrays=arrays,
                num_rounds=1,
                train_config=ConfigRecord({"clients": num_clients, "steps": num_steps}),
            )
            module.load_state_dict(result.arrays.to_torch_state_dict())
            return time.perf_counter() - started, delta_of(module, problem)

        session.serve(run)

    return app


def main() -> None:
    # Ray's workers import the client from here.
    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).resolve().parent)
    session = Session("flwr", "ray", "torch")
    num_clients = session.problem.num_clients
    run_simulation(
        server_app(session),
        client_app(os.path.abspath(session.path), num_clients),
        num_supernodes=num_clients,
        backend_config={
            "init_args": {"num_cpus": NUM_WORKERS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
