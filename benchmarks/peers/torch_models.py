"""The benchmarks' networks in PyTorch, with weights from and to the arrays of a problem.

Parameters are named after the arrays: "Conv_0/kernel" is `Conv_0.weight`.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from problem import Params, Problem
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish() -> None:
    """Waits until the device has computed what it was asked to."""
    if DEVICE.type != "cpu":
        torch.cuda.synchronize()


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Computes in full float32, also where PyTorch rounds factors of convolutions by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class WithLoss(nn.Module):
    """What pfl asks of a module: a loss, and metrics that are never evaluated here."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        return nn.functional.cross_entropy(self.module(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}


class LogisticRegression(nn.Module):
    def __init__(self, num_features: int, num_classes: int):
        super().__init__()
        self.Dense_0 = nn.Linear(num_features, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Dense_0(x)


class EmnistCnn(nn.Module):
    def __init__(
        self, channels: int, size: int, num_classes: int, dropout: tuple[float, float] = (0.0, 0.0)
    ):
        super().__init__()
        side = (size - 4) // 2
        self.dropout = dropout
        self.flattened = {"Dense_0/kernel": (side, side, 64)}
        self.Conv_0 = nn.Conv2d(channels, 32, 3)
        self.Conv_1 = nn.Conv2d(32, 64, 3)
        self.Dense_0 = nn.Linear(side * side * 64, 128)
        self.Dense_1 = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.Conv_0(x))
        x = nn.functional.max_pool2d(torch.relu(self.Conv_1(x)), 2)
        x = nn.functional.dropout(x, self.dropout[0], self.training)
        x = torch.relu(self.Dense_0(x.flatten(1)))
        return self.Dense_1(nn.functional.dropout(x, self.dropout[1], self.training))


class ThesisCnn(nn.Module):
    def __init__(self, channels: int, size: int, num_classes: int):
        super().__init__()
        side = size // 4
        self.flattened = {"Dense_0/kernel": (side, side, 32)}
        self.Conv_0 = nn.Conv2d(channels, 16, 5, padding=2)
        self.Conv_1 = nn.Conv2d(16, 32, 5, padding=2)
        self.Dense_0 = nn.Linear(side * side * 32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.Conv_0(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.Conv_1(x)), 2)
        return self.Dense_0(x.flatten(1))


class _Block(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, width)
        self.has_shortcut = stride != 1 or num_in != width
        if self.has_shortcut:
            self.shortcut = nn.Conv2d(num_in, width, 1, stride, bias=False)
            self.shortcut_norm = nn.GroupNorm(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.has_shortcut:
            x = self.shortcut_norm(self.shortcut(x))
        return torch.relu(x + y)


class ResNet18(nn.Module):
    def __init__(self, channels: int, num_classes: int):
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(2, 64)
        self.order = []
        num_in = 64
        for stage, width in enumerate((64, 128, 256, 512), start=1):
            for block in (1, 2):
                stride = 2 if stage > 1 and block == 1 else 1
                self.order.append(f"stage{stage}_block{block}")
                self.add_module(self.order[-1], _Block(num_in, width, stride))
                num_in = width
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        for name in self.order:
            x = self.get_submodule(name)(x)
        return self.head(x.mean((2, 3)))


def network(problem: Problem) -> nn.Module:
    """Builds the problem's network with the problem's weights."""
    *_, channels = problem.x.shape[2:]
    size = problem.x.shape[2]
    if problem.model == "logistic_regression":
        module: nn.Module = LogisticRegression(size, problem.num_classes)
    elif problem.model == "emnist_cnn":
        module = EmnistCnn(channels, size, problem.num_classes)
    elif problem.model == "thesis_cnn":
        module = ThesisCnn(channels, size, problem.num_classes)
    else:
        module = ResNet18(channels, problem.num_classes)
    module.to(DEVICE, torch.from_numpy(problem.x[:0]).dtype)
    reset(module, problem)
    return module


def inputs(x: np.ndarray) -> torch.Tensor:
    """Turns examples `[..., height, width, channels]` into `[..., channels, height, width]`.

    Always by a copy: an axis of size 1 that is only moved keeps strides that PyTorch reads as
    "channels last", a layout on which Opacus 1.6.0 unfolds convolutions wrongly.
    """
    if x.ndim < 5:
        return torch.from_numpy(x).to(DEVICE)
    return torch.from_numpy(np.array(np.moveaxis(x, -1, -3), order="C", copy=True)).to(DEVICE)


@torch.no_grad()
def reset(module: nn.Module, problem: Problem) -> None:
    """Gives the network the problem's initial weights."""
    parameters = dict(module.named_parameters())
    if len(parameters) != len(problem.params):
        raise ValueError(f"the network has {len(parameters)} parameters, not {len(problem.params)}")
    for name, parameter in parameters.items():
        path = path_of(name, parameter)
        value = to_torch(module, path, problem.params[path])
        if value.shape != tuple(parameter.shape):
            raise ValueError(f"{path} has the shape {value.shape}, not {tuple(parameter.shape)}")
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def arrays_of(module: nn.Module) -> Params:
    """Reads the weights under the names and in the shapes of a problem."""
    arrays = {}
    for name, parameter in module.named_parameters():
        path = path_of(name, parameter)
        arrays[path] = from_torch(module, path, parameter.detach().cpu().numpy())
    return arrays


def delta_of(module: nn.Module, problem: Problem) -> Params:
    """Subtracts the problem's weights from the network's."""
    return {path: value - problem.params[path] for path, value in arrays_of(module).items()}


def path_of(name: str, parameter: torch.Tensor) -> str:
    *where, last = name.split(".")
    if last == "weight":
        last = "kernel" if parameter.ndim > 1 else "scale"
    return "/".join((*where, last))


def to_torch(module: nn.Module, path: str, value: np.ndarray) -> np.ndarray:
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    if value.ndim != 2:
        return value
    rows = getattr(module, "flattened", {}).get(path)
    if rows is not None:
        value = value.reshape(*rows, -1).transpose(2, 0, 1, 3).reshape(value.shape)
    return value.T


def from_torch(module: nn.Module, path: str, value: np.ndarray) -> np.ndarray:
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim != 2:
        return value
    value = value.T
    rows = getattr(module, "flattened", {}).get(path)
    if rows is not None:
        height, width, channels = rows
        value = value.reshape(channels, height, width, -1).transpose(1, 2, 0, 3)
        value = value.reshape(height * width * channels, -1)
    return value
