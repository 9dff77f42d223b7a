"""Parts of fedjax_dp, by the same checks."""

import dp_accounting

from fedjax_dp import clients, data, server
from fedjax_dp.audit.conformance import (
    Accounting,
    Poisson,
    Release,
    Served,
    Training,
    aggregation_of,
    mask_source_of,
    masking_of,
    sampling_of,
    step_of,
)
from fedjax_dp.audit.conformance.subjects import Subject
from fedjax_dp.privacy import Ledger, make_adaptive_clipping
from fedjax_dp.server import secure

SHAPES = [(3, 2), (2,)]


def epsilon(rounds: int, dp_delta: float) -> float:
    """States the ε of rounds in which 5 % of 1,000 records are expected."""
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.0))
    ledger = Ledger("record", "add_remove")
    ledger.charge(event, count=rounds)
    return float(ledger.epsilon(dp_delta, "pld")[0])


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects, which need no other process."""
    numbers = clients.LocalConfig(batch_size=4.0, clip_norm=1.0, noise_multiplier=1.0)
    accounted = Training(Release(1.0, 1.0, 50.0), Poisson(1000, 0.05), 100)
    rule = make_adaptive_clipping(4.0, initial_clip_norm=1.0, count_stddev=1.0)
    means = {
        "Gaussian mean": server.gaussian_mean(1.0, 1.0, 4.0),
        "Laplace mean": server.laplace_mean(1.0, 1.0, 4.0),
        "adaptive clipping": server.adaptive_gaussian_mean(rule, 1.0),
    }
    graph = secure.all_pairs(4, dropouts=1)
    return [
        Accounting("accountant PLD", epsilon, accounted),
        sampling_of("Poisson sampling", data.poisson(), 32, 4.0),
        sampling_of("fixed size", data.fixed_size(), 32, 4),
        sampling_of("shuffled", data.shuffled(), 32, 4),
        step_of("step", clients.clipped, numbers, SHAPES, rows=4),
        *(aggregation_of(name, mean, SHAPES, rows=4) for name, mean in means.items()),
        masking_of("masks, simulated keys", graph),
        masking_of("masks, agreed keys", graph, keys=secure.agreed_keys(4)),
        mask_source_of("masks of pairs, agreed keys", secure.agreed_keys, count=46_341),
    ]
