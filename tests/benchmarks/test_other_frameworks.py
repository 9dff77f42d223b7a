"""The code of other frameworks on the page for those who come from them runs in their environments.

`python -m benchmarks.peers.install` makes these; `FEDJAX_DP_PEERS` names another folder of them.
"""

import os
import pathlib
import re
import subprocess

import pytest
from marks import slow

from benchmarks.peers import install

PAGE = install.HERE.parents[1] / "docs" / "start" / "coming-from.md"
FOLDER = pathlib.Path(os.environ.get("FEDJAX_DP_PEERS", install.HERE / ".venvs"))
DATA = """
import numpy as np
rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 8)).astype("float32")
y, owner = (x[:, 0] > 0).astype("int32"), rng.integers(0, 50, 2000)
"""
# What the text around a block describes, and what is true after it.
AROUND = {
    "fedjax": ("import jax, jax.numpy as jnp\njax.tree_map = jax.tree.map", "assert diagnostics"),
    "pfl": (
        """
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant

class Linear(torch.nn.Linear):
    def loss(self, x, y, is_eval=False):
        logits = self(torch.as_tensor(x))
        return torch.nn.functional.cross_entropy(logits, torch.as_tensor(y).long())

    def metrics(self, x, y, is_eval=False):
        return {"loss": Weighted.from_unweighted(float(self.loss(x, y)))}

def user(i):
    return Dataset(raw_data=[x[owner == i], y[owner == i].astype("int64")])
""",
        "assert any(p.abs().sum() > 0 for p in module.parameters())",
    ),
    "flower": (
        """
def batches_of(i):
    import torch
    own = torch.tensor(x[owner == i]), torch.tensor(y[owner == i]).long()
    return [own]
""",
        """
from flwr.simulation import run_simulation
run_simulation(server_app=server, client_app=client, num_supernodes=50)
""",
    ),
    "opacus": ("", "assert 3.5 < engine.get_epsilon(1e-5) <= 4.01"),
    "jax_privacy": ("import jax, jax.numpy as jnp", "assert accountant.get_epsilon(1e-5) > 0"),
}
IMPORTS = {"fedjax": "import fedjax", "pfl": "PyTorchModel(", "flower": "from flwr"}
IMPORTS |= {"opacus": "from opacus", "jax_privacy": "from jax_privacy"}


@pytest.mark.parametrize("peer", AROUND)
def test_a_page_has_one_block_of_each_framework(peer):
    assert IMPORTS[peer] in block_of(peer)


def block_of(peer):
    """The one block of a framework."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if IMPORTS[peer] in block)
    return found


@slow
@pytest.mark.parametrize("peer", AROUND)
def test_the_code_of_another_framework_runs(peer, tmp_path):
    if not install.is_installed(peer, FOLDER):
        pytest.skip(f"needs the environment of {peer}")
    before, after = AROUND[peer]
    file = tmp_path / "block.py"
    file.write_text("\n".join([DATA, before, block_of(peer), after]), "utf-8")
    python = str(install.python_of(peer, FOLDER))
    done = subprocess.run([python, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
