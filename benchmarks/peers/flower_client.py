"""The client of the Flower benchmark, in a module of its own that Ray's workers can import."""

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from problem import load
from torch import nn
from torch_models import inputs, network


@functools.cache
def _prepared(path: str, num_clients: int):
    """Loads the problem once for each of Ray's workers."""
    torch.set_num_threads(1)
    problem = load(path, num_clients)
    x, y = problem.in_order()
    return problem, network(problem), inputs(x), torch.from_numpy(y).long()


def client_app(path: str, num_clients: int) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        problem, module, x, y = _prepared(path, num_clients)
        client = int(context.node_config["partition-id"])
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        takes_part = client < int(message.content["config"]["clients"])
        optimizer = torch.optim.SGD(module.parameters(), lr=problem.learning_rate)
        for step in range(int(message.content["config"]["steps"])):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[client, step]), y[client, step]).backward()
            optimizer.step()
        arrays = ArrayRecord(module.state_dict())
        metrics = MetricRecord({"num-examples": int(takes_part)})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app
