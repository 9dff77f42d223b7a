"""The privacy statement of a run, derived from its ledger: as data and text."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms.distributed import (
    DistributedDiscreteGaussianDpEvent,
    SkellamDpEvent,
)
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import EntrywiseDpEvent
from fedjax_dp.privacy.reports.facts import (
    HIDDEN,
    MECHANISMS,
    NO_SAMPLING,
    NOISE,
    RESTS_ON_MASKS,
    ROOTS,
    SAMPLERS,
    TRUST,
    Form,
    sentences,
)
from fedjax_dp.privacy.reports.large_delta import large_delta

_NOT_PRIVATE = (
    "training losses, accuracies, norms, shares of clipped contributions, who took part and how "
    "many, and what reveals how many, such as bytes sent, seconds and the share of padding, all "
    "computed exactly for the experimenter",
    "the numbers of examples and clients, which are treated as public",
    "choices that were made from the data outside of the run, such as hyper-parameters",
)
_NOT_CONTINUOUS = {
    MECHANISMS[kind].page
    for kind in (
        standard.DiscreteLaplaceDpEvent,
        dpa.RandomizedResponseDpEvent,
        dpa.NonPrivateDpEvent,
        DistributedDiscreteGaussianDpEvent,
        SkellamDpEvent,
    )
}
_FLOATING_POINT = (
    "The claim is for real-valued noise. The added noise is floating-point. No tail is cut off, "
    "but the noise and the sums that it was added to lie on a grid. Those who see the last "
    "bits of a release may learn more than is claimed (Mironov 2012; Haney and others 2022; "
    "Casacuberta and others 2022). "
)
_WAY_OUT = {
    "client": (
        "The discrete mechanisms have no such gap: `central_discrete_gaussian`, where the server "
        "adds the noise, and `discrete_gaussian`, where the clients do."
    ),
    "record": (
        "There is no discrete mechanism on records; whole clients have them "
        "(`central_discrete_gaussian`, `discrete_gaussian`)."
    ),
}

_KEPT = (
    "Clients have personal models, or parts of them, which are released to the client itself "
    "alone; "
)
_WITHOUT_NOISE = (
    "they contain no noise, and no ε covers them: publishing them, or answering queries with them, "
    "releases more than is counted."
)
_STATES = (
    "Clients have states of their own from round to round, such as control variates, which never "
    "leave them: a release depends on them only through messages that are clipped. They contain no "
    "noise, and no ε covers them."
)
_WITHIN = "they were trained within the releases that are counted, which cover them."


class Facts(NamedTuple):
    """What a claim depends on beside the ledger, which facts of a run may replace by name."""

    trust: str | None = None  # Who is trusted; by default follows from unit and mechanisms.
    not_covered: str | None = None  # What no ε covers, as text.
    noise_root: str = "seed"  # What the run's randomness was derived from.
    also_not_private: Sequence[str] = ()  # What else was computed from exact records.
    has_personal_models: bool = False  # Which no ε covers.
    has_client_states: bool = False  # Of clients alone, which are no models.
    num_shared: int = 0  # Records that several clients have,
    most_holders: int = 1  # at most so many each.
    # How many clients, or records of each client, which a δ is compared with.
    num_units: ArrayLike | None = None
    budget: ArrayLike | None = None  # The ε that was allowed.


def statement(
    ledger: Ledger, dp_delta: ArrayLike, *, accountant: str = "rdp", **facts: Any
) -> dict[str, Any]:
    """Collects the claim of a ledger's run, as plain data that `json` can write.

    Sampler, mechanism and noise come from the charged events, so that the statement cannot differ
    from what ran. By default the server is trusted under a claim for clients, only the client under
    one for records, and parties and server if noise came in gamma shares. Facts that are no `Facts`
    are added as they are; `SENTENCES` has words for some. ε is that at `dp_delta`. Where messages
    need masks, the claimed δ is larger by `dp_delta_of_masks`, the probability that a random graph
    of masks fails to keep a message secret in some round. Figures that differ by unit are given as
    the smallest and the largest, None if absent, and an infinite ε as "inf".
    """
    known = Facts()._replace(**{name: facts.pop(name) for name in Facts._fields if name in facts})
    deltas = np.asarray(dp_delta, float)
    inside = bool(np.all((deltas > 0) & (deltas < 1)))
    checks.require(inside, "dp_delta", "be in (0, 1)", dp_delta)
    checks.one_of("noise_root", known.noise_root, ROOTS)
    epsilon = ledger.epsilon(dp_delta, accountant)
    histories = ledger.histories()
    samplers: set[str] = set()
    mechanisms: set[str] = set()
    noise: dict[str, list[float]] = {name: [] for name in (*NOISE, "sampling_rate")}
    for _, history in histories:
        for part, _ in ev.flatten(history):
            _describe(part, samplers, mechanisms, noise)
    default = {"client": "server", "record": "client"}[ledger.unit]
    if MECHANISMS[GammaSharesDpEvent].page in mechanisms:
        default = "gamma_shares"
    trusted = known.trust or default
    if facts.get("deployment", {}).get("keys") == "parity":
        trusted = "server"
    checks.one_of("trust", trusted, TRUST)
    root, own_keys = known.noise_root, facts.get("deployment", {}).get("keys") == "device"
    if root == "secret" and own_keys and trusted != "server":
        # The root of the run, which the server has, draws no noise.
        root, _ = "nodes", facts.pop("noise_root_file", None)
    hidden = sorted({what for s in samplers for what in HIDDEN.get(s, ())}, reverse=True)
    rule = (
        "not be honest_but_curious: such a server knows who was drawn, which sampling keeps hidden"
    )
    checks.require(trusted != "honest_but_curious" or not hidden, "trust", rule, trusted)
    exposed = 0.0
    if trusted in RESTS_ON_MASKS:
        masks = facts.get("secure_aggregation", {})
        exposed = float(np.max(ledger.num_compositions)) * masks.get("secrecy_failure", 0.0)
    claimed = np.minimum(deltas + exposed, 1.0)
    data = {
        "unit": ledger.unit,
        "relation": ledger.relation,
        "samplers": sorted(samplers),
        "mechanisms": sorted(mechanisms),
        **{name: [min(found), max(found)] if found else None for name, found in noise.items()},
        "dp_delta": np.max(claimed),
        "dp_delta_per_unit": np.broadcast_to(claimed, ledger.num_units),
        "epsilon": np.max(epsilon),
        "epsilon_per_unit": epsilon,
        "accountant": accountant,
        "num_compositions": ledger.num_compositions,
        "histories": [
            {"units": units, "event": ev.to_dict(history)} for units, history in histories
        ],
        "trusted": trusted,
        "noise_root": root,
        "must_stay_hidden": hidden,
        "not_private": [*_NOT_PRIVATE, *known.also_not_private],
    }
    if exposed:
        data["dp_delta_of_masks"] = exposed
    num_units = known.num_units
    if num_units is None and ledger.unit == "client" and ledger.num_units > 1:
        num_units = ledger.num_units
    if num_units is not None and (text := large_delta(ledger.unit, claimed, num_units)):
        data["large_delta"] = text
    if known.budget is not None:
        data["budget_per_unit"] = np.broadcast_to(np.asarray(known.budget, float), ledger.num_units)
    if mechanisms - _NOT_CONTINUOUS:
        data["floating_point"] = _FLOATING_POINT + _WAY_OUT[ledger.unit]
    if known.has_personal_models:
        is_covered = ledger.unit == "record" and known.not_covered is None
        data["kept_by_clients"] = _KEPT + (_WITHIN if is_covered else _WITHOUT_NOISE)
    elif known.has_client_states and ledger.unit == "client":
        data["states_of_clients"] = _STATES
    if known.num_shared and ledger.unit == "record":
        data["shared_records"] = {
            "num_shared": known.num_shared,
            "most_holders": known.most_holders,
            **_of_all_copies(ledger, deltas, epsilon, known.most_holders, accountant, exposed),
        }
    if known.not_covered is not None:
        data["not_covered"] = known.not_covered
    return {key: _plain(value) for key, value in {**facts, **data}.items()}


def _of_all_copies(
    ledger: Ledger,
    deltas: np.ndarray,
    epsilon: np.ndarray,
    holders: int,
    accountant: str,
    exposed: float,
) -> dict[str, Any]:
    """Bounds the privacy loss of a record of which several clients have a copy.

    Clients noise independently, so that the copies compose. If all clients have one history it is
    composed by the accountant; else the largest ε and δ are added up, which bounds any of them.
    In the rounds of each copy masks fail with a probability of `exposed`.
    """
    if ledger.num_units < holders:
        # Copies within one account change its steps together, which no event describes.
        return {"epsilon": None, "dp_delta": None, "by": None}
    histories = ledger.histories()
    if len(histories) == 1 and np.min(deltas) == np.max(deltas):
        whole = Ledger(ledger.unit, ledger.relation)
        whole.charge(histories[0][1], count=holders)
        spent = np.max(whole.epsilon(np.max(deltas), accountant))
        total = min(np.max(deltas) + holders * exposed, 1.0)
        return {"epsilon": spent, "dp_delta": total, "by": accountant}
    each = np.broadcast_to(deltas + exposed, ledger.num_units)
    largest = [np.sum(np.sort(values)[-holders:]) for values in (epsilon, each)]
    if largest[1] >= 1:
        return {"epsilon": None, "dp_delta": None, "by": "basic composition"}
    return {"epsilon": largest[0], "dp_delta": largest[1], "by": "basic composition"}


def _describe(
    event: DpEvent, samplers: set[str], mechanisms: set[str], noise: dict[str, list[float]]
) -> None:
    if isinstance(event, standard.RepeatAndSelectDpEvent):
        for part, _ in ev.flatten(event.event):
            _describe(part, samplers, mechanisms, noise)
        return
    samplers.add(SAMPLERS.get(type(event), NO_SAMPLING).page)
    rate = ev.sampling_rate(event)
    if rate is not None:
        noise["sampling_rate"].append(rate)
    inner = [event]
    if isinstance(event, dpa.PoissonSampledDpEvent | dpa.SampledWithoutReplacementDpEvent):
        inner = [part for part, _ in ev.flatten(event.event)]
    for part in inner:
        known = MECHANISMS.get(type(part))
        mechanisms.add(known.page if known else type(part).__name__)
        # The multiplier is a standard deviation for Gaussian noise only.
        if isinstance(part, EntrywiseDpEvent):
            noise["entry_stddev"].append(part.entry_stddev)
        elif isinstance(part, DistributedDiscreteGaussianDpEvent):
            scale = math.sqrt(part.num_shares) * part.noise_scale
            noise["discrete_multiplier"].append(scale / part.l2_norm)
        elif isinstance(part, SkellamDpEvent):
            noise["discrete_multiplier"].append(math.sqrt(part.variance) / part.l2_norm)
        elif isinstance(part, dpa.LaplaceDpEvent | GammaSharesDpEvent):
            noise["laplace_scale"].append(float(part.noise_multiplier))
        elif hasattr(part, "noise_multiplier"):
            noise["noise_multiplier"].append(float(part.noise_multiplier))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value


def in_words(data: dict[str, Any]) -> str:
    """Writes what `statement` returned as Markdown paragraphs."""
    return " ".join(sentences(data, _PAGE)).replace(" \n\n", "\n\n") + "\n"


_PAGE = Form(lambda words: words.page, " to ".join, str)
