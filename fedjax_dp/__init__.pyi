"""The public names, for tools that read types; `__init__.py` imports each when it is asked for."""

from . import (
    algorithms as algorithms,
)
from . import (
    audit as audit,
)
from . import (
    clients as clients,
)
from . import (
    core as core,
)
from . import (
    data as data,
)
from . import (
    engine as engine,
)
from . import (
    evaluation as evaluation,
)
from . import (
    experiment as experiment,
)
from . import (
    io as io,
)
from . import (
    models as models,
)
from . import (
    privacy as privacy,
)
from . import (
    server as server,
)
from .algorithms import (
    ALGORITHMS as ALGORITHMS,
)
from .algorithms import (
    ClientOutput as ClientOutput,
)
from .algorithms import (
    ClientState as ClientState,
)
from .algorithms import (
    FederatedAlgorithm as FederatedAlgorithm,
)
from .algorithms import (
    Hyper as Hyper,
)
from .algorithms import (
    Round as Round,
)
from .algorithms import (
    SharedModel as SharedModel,
)
from .algorithms import (
    ae_dpfl as ae_dpfl,
)
from .algorithms import (
    blur_lus as blur_lus,
)
from .algorithms import (
    centralized as centralized,
)
from .algorithms import (
    ditto as ditto,
)
from .algorithms import (
    dp_fedavg as dp_fedavg,
)
from .algorithms import (
    dp_sgd as dp_sgd,
)
from .algorithms import (
    f_cdpfl as f_cdpfl,
)
from .algorithms import (
    fed_ltn as fed_ltn,
)
from .algorithms import (
    fedadagrad as fedadagrad,
)
from .algorithms import (
    fedadam as fedadam,
)
from .algorithms import (
    fedavg as fedavg,
)
from .algorithms import (
    fedavgm as fedavgm,
)
from .algorithms import (
    fedbn as fedbn,
)
from .algorithms import (
    fedper as fedper,
)
from .algorithms import (
    fedprox as fedprox,
)
from .algorithms import (
    fedrep as fedrep,
)
from .algorithms import (
    fedyogi as fedyogi,
)
from .algorithms import (
    ifca as ifca,
)
from .algorithms import (
    jump_start as jump_start,
)
from .algorithms import (
    km_cdpfl as km_cdpfl,
)
from .algorithms import (
    local_only as local_only,
)
from .algorithms import (
    lottery_fl as lottery_fl,
)
from .algorithms import (
    minimum_epsilon as minimum_epsilon,
)
from .algorithms import (
    mr_mtl as mr_mtl,
)
from .algorithms import (
    noise_oracle as noise_oracle,
)
from .algorithms import (
    o_dpcfl as o_dpcfl,
)
from .algorithms import (
    pfa as pfa,
)
from .algorithms import (
    pool as pool,
)
from .algorithms import (
    r_dpcfl as r_dpcfl,
)
from .algorithms import (
    rc_dpfl as rc_dpfl,
)
from .algorithms import (
    record_dp_fedavg as record_dp_fedavg,
)
from .algorithms import (
    robust_hdp as robust_hdp,
)
from .algorithms import (
    scaffold as scaffold,
)
from .algorithms import (
    weiavg as weiavg,
)
from .clients import (
    LocalConfig as LocalConfig,
)
from .clients import (
    LocalTrainer as LocalTrainer,
)
from .clients import (
    dp_sgd_trainer as dp_sgd_trainer,
)
from .clients import (
    drawn_back as drawn_back,
)
from .clients import (
    local_trainer as local_trainer,
)
from .clients import (
    prune as prune,
)
from .clients import (
    pruned_share as pruned_share,
)
from .clients import (
    update_transform as update_transform,
)
from .core.keys import (
    secret_key as secret_key,
)
from .data import (
    FederatedData as FederatedData,
)
from .data import (
    Participation as Participation,
)
from .data import (
    Sampler as Sampler,
)
from .data import (
    cyclic as cyclic,
)
from .data import (
    everybody as everybody,
)
from .data import (
    everybody_first as everybody_first,
)
from .data import (
    fixed_size as fixed_size,
)
from .data import (
    min_separated as min_separated,
)
from .data import (
    participation as participation,
)
from .data import (
    poisson as poisson,
)
from .data import (
    shuffled as shuffled,
)
from .engine import (
    Communication as Communication,
)
from .engine import (
    ExecutionConfig as ExecutionConfig,
)
from .engine import (
    Fate as Fate,
)
from .engine import (
    Federation as Federation,
)
from .engine import (
    Layout as Layout,
)
from .engine import (
    PrivacyAccounting as PrivacyAccounting,
)
from .engine import (
    RoundInfo as RoundInfo,
)
from .engine import (
    RoundRecord as RoundRecord,
)
from .engine import (
    Simulation as Simulation,
)
from .engine import (
    SimulationState as SimulationState,
)
from .engine import (
    calibrate as calibrate,
)
from .engine import (
    communication as communication,
)
from .engine import (
    compile_federation as compile_federation,
)
from .engine import (
    evaluator as evaluator,
)
from .engine import (
    federation as federation,
)
from .engine import (
    run_event as run_event,
)
from .engine import (
    simulation as simulation,
)
from .engine import (
    told as told,
)
from .experiment.running.loading import (
    load_run as load_run,
)
from .models import (
    Model as Model,
)
from .privacy import (
    Ledger as Ledger,
)
from .server import (
    Aggregator as Aggregator,
)
from .server import (
    RoundKey as RoundKey,
)
from .server import (
    Stack as Stack,
)
from .server import (
    Stacked as Stacked,
)
from .server import (
    Summed as Summed,
)
from .server import (
    gaussian_mean as gaussian_mean,
)
from .server import (
    gradient_mask as gradient_mask,
)
from .server import (
    sparse_mean as sparse_mean,
)
from .server import (
    weighted_mean as weighted_mean,
)

__version__: str
