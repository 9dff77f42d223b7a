"""The one list of public names: for editors and type checkers, for `dir()` and at run time."""

from . import (
    algorithms as algorithms,
    audit as audit,
    clients as clients,
    data as data,
    engine as engine,
    evaluation as evaluation,
    experiment as experiment,
    extending as extending,
    flower as flower,
    io as io,
    models as models,
    privacy as privacy,
    server as server,
)
from .algorithms import (
    FederatedAlgorithm as FederatedAlgorithm,
    ditto as ditto,
    dp_fedavg as dp_fedavg,
    dp_sgd as dp_sgd,
    fedadam as fedadam,
    fedavg as fedavg,
    fedprox as fedprox,
    scaffold as scaffold,
)
from .clients import (
    LocalConfig as LocalConfig,
    LocalTrainer as LocalTrainer,
    dp_sgd_trainer as dp_sgd_trainer,
    local_trainer as local_trainer,
    update_transform as update_transform,
)
from .core.keys import secret_key as secret_key
from .data import (
    FederatedData as FederatedData,
    Participation as Participation,
    Sampler as Sampler,
    cyclic as cyclic,
    full_participation as full_participation,
    fixed_size as fixed_size,
    min_separated as min_separated,
    participation as participation,
    poisson as poisson,
    shuffled as shuffled,
    without_amplification as without_amplification,
)
from .engine import (
    ExecutionConfig as ExecutionConfig,
    Fate as Fate,
    Federation as Federation,
    Layout as Layout,
    PrivacyAccounting as PrivacyAccounting,
    RoundInfo as RoundInfo,
    RoundRecord as RoundRecord,
    Simulation as Simulation,
    SimulationState as SimulationState,
    calibrate as calibrate,
    communication as communication,
    compile_federation as compile_federation,
    evaluator as evaluator,
    federation as federation,
    simulation as simulation,
)
from .experiment.running.loading import load_run as load_run
from .models import Model as Model
from .privacy import Ledger as Ledger
from .server import (
    Aggregator as Aggregator,
    gaussian_mean as gaussian_mean,
    weighted_mean as weighted_mean,
)

__version__: str
