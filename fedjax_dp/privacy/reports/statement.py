"""The privacy statement of a run, derived from its ledger: as data and as text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.decimals import shown
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting.large_delta import large_delta
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms.distributed import (
    DistributedDiscreteGaussianDpEvent,
    SkellamDpEvent,
)
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.scalar_noise import (
    BoundedLaplaceDpEvent,
    EntrywiseDpEvent,
    PureDpEvent,
    StaircaseDpEvent,
)
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent

_UNITS = {"client": "one client with all of its data", "record": "one record of one client"}
_RELATIONS = {
    "add_remove": "neighbouring data differ by {unit}, which is present or absent",
    "zero_out": (
        "neighbouring data differ by {unit}, whose contributions are replaced by zeros; it still "
        "counts towards the numbers of clients and records, which are public because rates, steps "
        "and divisors are computed from them"
    ),
    "replace_one": "neighbouring data differ by {unit}, which is exchanged for any other",
}
_TRUST = {
    "server": (
        "The server is trusted: it sees every clipped contribution and adds the noise. The claim "
        "holds against all who see only the released models."
    ),
    "client": (
        "Only the client itself is trusted: its noise is added before anything leaves it. "
        "The claim holds against the server and everyone else."
    ),
    "secure_aggregation": (
        "Secure aggregation is trusted, and it is assumed that at least the accounted number of "
        "shares of the noise is added, one by every client and, if cohorts vary, the missing ones "
        "by the summing party, which knows them: a single message carries too little noise to "
        "protect anyone."
    ),
    "honest_but_curious": (
        "The server is honest but curious: it follows the protocol, and learns of a cohort's "
        "messages nothing but their sum. As many clients as are stated below may collude with it "
        "and subtract the shares of the noise that they added; only those of the others count."
    ),
    "gamma_shares": (
        "Every party is trusted to add its shares of the noise and to keep secret the shares that "
        "it knows, and the server to follow the protocol, in which it sees only masked messages. "
        "The claim holds against all who see only the sums. It does not hold against a coalition "
        "of parties, which can subtract the shares that its members know, nor against a server "
        "that fakes parties (a Sybil attack) and knows how it permuted the shares: that would take "
        "a secure shuffle, which is not implemented."
    ),
    "selection": (
        "The server and those who run the trials are trusted: they see every trial, and how many "
        "there were. The claim holds against all who see only what is published of the best one."
    ),
}
_OF_SUMS = (
    "The server is trusted: it sees the sum of all clipped contributions and adds the noise. The "
    "claim holds against all who see only the released models."
)
_SECURE = (
    "Secure aggregation: {forms}, under {pairs}. It protects as long as the number of clients of a "
    "round that collude with the server is at most {colluders}. If more than {dropouts} drop out, "
    "the round is lost. {keys}"
)
# Trust under which a message by itself has too little noise.
RESTS_ON_MASKS = ("secure_aggregation", "honest_but_curious", "gamma_shares")
_EXPOSED = (
    " In a round, the random graph of masks fails to keep messages secret with a probability of at "
    "most {probability}; δ includes {dp_delta} for all rounds."
)
_FORMS = {
    "masked": "every mask was made and removed",
    "cancelled": "masks, which leave no trace in a sum, were left out of the simulation",
}
_MASK_KEYS = {
    "simulated": "Key agreement is simulated: seeds of masks follow from the run's public keys.",
    "agreed": "Seeds of masks were agreed by X25519 and HKDF, within one process.",
    "between_nodes": (
        "Seeds of masks were agreed by X25519 and HKDF between the clients on their nodes, with "
        "new keys in each round. The server carried the public keys: one that exchanges them can "
        "stand between two nodes, and against it messages are not secret. A seed has 64 bits, and "
        "masks are streams of Threefry, which is not a cryptographic generator: messages are "
        "secret from those who cannot search that many seeds."
    ),
}
_DEPLOYED = (
    "Deployed on Flower: clips and noise of clients are made on the nodes, which are trusted to "
    "make them as agreed, and by the clients of a node to keep their updates to themselves. Nodes "
    "run the app and the configuration that the person who starts the run sends them: the claim "
    "trusts that person, except for nodes that run signed apps alone, with a configuration of "
    "their own. {keys} "
    "A client whose node is offline when it is drawn, or whose reply does not fit, sends nothing: "
    "the claim assumes that this depends neither on the model nor on who else is drawn. The "
    "SuperLink's log and database record who was messaged: those who read them must keep it "
    "secret. Rounds whose messages were sent are charged, including those whose outcome was lost."
)
_WITHOUT_MASKS = (
    " Nodes agreed on no keys of masks: the server can read the message of each node by itself, "
    "and the claim does not hold against a server that does so before it adds them up."
)
_SCORES = (
    " Training scripts of participants report exact scores, which no noise protects and no ε "
    "covers: the server has them in `scores.jsonl`."
)
_DEPLOYED_KEYS = {
    "device": "Each node draws the keys of its clients from its operating system.",
    "parity": (
        "The server made the keys of all clients, as tests need it: it can subtract all noise that "
        "clients add, and must be trusted."
    ),
}
_ROOTS = {
    "seed": (
        "The noise is a function of the seed of the run, `run.seed` in `config.toml`: anyone who "
        "has it can reproduce the noise and subtract it, and the claim does not hold against them. "
        "Runs that share a seed share noise, so that publishing two of them may cancel it. "
        "`run.secret = true` draws the noise from a secret root instead."
    ),
    "secret": (
        "Cohorts, batches and noise were drawn from a secret root from the operating system, "
        "which no other run shares. It must be destroyed or kept secret, with everything "
        "saved beside it: anyone who has the root can subtract the noise. The root has as many "
        "bits as a key of JAX, 64 by default, and JAX's generator is not cryptographic: the claim "
        "holds against those who cannot search that many keys."
    ),
}
_NOT_PRIVATE = (
    "training losses, accuracies, norms, shares of clipped contributions, who took part and how "
    "many, and what reveals how many, such as bytes sent, seconds and the share of padding, all of "
    "which are computed exactly for the experimenter",
    "the numbers of examples and clients, which are treated as public",
    "choices that were made from the data outside of the run, such as hyper-parameters",
)
_MECHANISMS = {
    dpa.GaussianDpEvent: "Gaussian noise",
    dpa.TruncatedSubsampledGaussianDpEvent: "Gaussian noise",
    dpa.LaplaceDpEvent: "Laplace noise",
    dpa.ZCDpEvent: "releases with a zCDP cost",
    dpa.RandomizedResponseDpEvent: "randomised response",
    standard.DiscreteLaplaceDpEvent: "discrete Laplace noise",
    dpa.NonPrivateDpEvent: "releases without privacy",
    DistributedDiscreteGaussianDpEvent: "discrete Gaussian noise",
    SkellamDpEvent: "Skellam noise",
    PureDpEvent: "mechanisms that are ε-DP",
    BoundedRangeDpEvent: "private selection by the exponential mechanism",
    StaircaseDpEvent: "staircase noise",
    GammaSharesDpEvent: "Laplace noise in gamma shares",
    BoundedLaplaceDpEvent: "bounded Laplace noise",
}

_SAMPLERS = {
    dpa.PoissonSampledDpEvent: "Poisson sampling",
    dpa.SampledWithoutReplacementDpEvent: "fixed-size sampling without replacement",
    dpa.TruncatedSubsampledGaussianDpEvent: "Poisson sampling truncated to a capacity",
}
_DRAWN = (
    " How often each unit was drawn is no secret: draws depend on no data, and the claim does not "
    "rest on them."
)
# What amplification by sampling assumes hidden. Without replacement the number is public.
_WHO, _COUNT = "which units were drawn", "how many units were drawn"
_HIDDEN = {
    "Poisson sampling": (_WHO, _COUNT),
    "Poisson sampling truncated to a capacity": (_WHO, _COUNT),
    "fixed-size sampling without replacement": (_WHO,),
}

_NOT_CONTINUOUS = {
    _MECHANISMS[kind]
    for kind in (
        standard.DiscreteLaplaceDpEvent,
        dpa.RandomizedResponseDpEvent,
        dpa.NonPrivateDpEvent,
        DistributedDiscreteGaussianDpEvent,
        SkellamDpEvent,
    )
}
_FLOATING_POINT = (
    "The claim is for real-valued noise. The added noise is floating-point: no tail is cut off, "
    "but the noise and the sums that it was added to lie on a grid, and those who see the last "
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

# Sentences about the size of the noise.
_NOISE = {
    "noise_multiplier": (
        "The Gaussian noise has a standard deviation of {} times the largest contribution of one "
        "unit. "
    ),
    "laplace_scale": (
        "The Laplace noise has a scale of {} times the largest L1 norm of one unit's contribution. "
    ),
    "discrete_multiplier": (
        "The discrete noise in a sum has a scale of {} times the largest L2 norm of one unit's "
        "contribution, both on the lattice. "
    ),
    "entry_stddev": (
        "Every entry has separate noise, with a standard deviation of {} times the bound on that "
        "entry. "
    ),
}

_CHOICE = (
    "The run is the best by {score} of a random number of runs, each of a setting drawn at random "
    "among {points}. Their number has a truncated negative binomial distribution of mean {mean:g} "
    "and shape {shape:g} (Papernot and Steinke 2022). ε is that of all runs and of the choice, if "
    "the chosen run's release and its setting are published and nothing else is: neither the other "
    "runs nor how many there were. Records that the score is computed on are not protected."
)
_PLANNED = (
    "The run ended early, by a rule on what it had released. Any of its {} planned rounds could "
    "have been the last, and ε is that of all of them."
)
_ONCE = (
    " Each record is read in one round only: its client pays for that round, and not for the other "
    "rounds that it takes part in."
)
_EVERY_ROUND = (
    " The noise was calibrated as if every client took part in every round; clients that were "
    "drawn less often spend less."
)
_PARAMETERS = (
    "Of the model's {whole:,} parameters {num_trained:,} are trained; {num_frozen:,} are frozen, "
    "and neither noised nor sent. "
)
_ORIGINS = {
    True: "The run started from parameters in a file; no ε here covers data that they were "
    "trained on.",
    False: "They have the initial values of the seed.",
}
_KEPT = (
    "Clients have personal models, or parts of them, which are released to the client itself "
    "alone; "
)
_WITHOUT_NOISE = (
    "they contain no noise, and no ε covers them: publishing them, or answering queries with them, "
    "releases more than is counted."
)
_WITHIN = "they were trained within the releases that are counted, which cover them."


def statement(
    ledger: Ledger,
    dp_delta: ArrayLike,
    *,
    accountant: str = "rdp",
    trust: str | None = None,
    not_covered: str | None = None,
    noise_root: str = "seed",
    also_not_private: Sequence[str] = (),
    has_personal_models: bool = False,
    num_shared: int = 0,
    most_holders: int = 1,
    num_units: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Collects the claim of a ledger's run, as plain data that `json` can write.

    Sampler, mechanism and noise come from the charged events, so that the statement cannot differ
    from what ran. By default the server is trusted under a claim for clients, only the client under
    one for records, and parties and server if noise came in gamma shares. `not_covered` and
    `also_not_private` name what no ε covers, personal models among the former if there are any;
    `num_shared` counts records that several clients have, at most `most_holders` each. `num_units`
    is the number of clients, or of the records of each client, which a δ is compared with; `budget`
    is the ε that was allowed. `facts` are added as they are; the text has `clip_norm`,
    `contribution`, `batch_size_per_unit`, `initial_clip_norm`, `seed`, `parameters`,
    `secure_aggregation`, `deployment`, `choice`, `planned_rounds`, `reads_once`,
    `assumes_every_round` and `versions` of them. ε is that at `dp_delta`. Where messages need
    masks, the claimed δ is larger by `dp_delta_of_masks`, the probability that a random graph of
    masks fails to keep a message secret in some round. Figures that differ by unit are given as the
    smallest and the largest, None if absent, and an infinite ε as "inf".
    """
    deltas = np.asarray(dp_delta, float)
    inside = bool(np.all((deltas > 0) & (deltas < 1)))
    checks.require(inside, "dp_delta", "be in (0, 1)", dp_delta)
    checks.one_of("noise_root", noise_root, _ROOTS)
    epsilon = ledger.epsilon(dp_delta, accountant)
    histories = ledger.histories()
    samplers: set[str] = set()
    mechanisms: set[str] = set()
    noise: dict[str, list[float]] = {name: [] for name in (*_NOISE, "sampling_rate")}
    for _, history in histories:
        for part, _ in ev.flatten(history):
            _describe(part, samplers, mechanisms, noise)
    default = {"client": "server", "record": "client"}[ledger.unit]
    if _MECHANISMS[GammaSharesDpEvent] in mechanisms:
        default = "gamma_shares"
    trusted = trust or default
    if facts.get("deployment", {}).get("keys") == "parity":
        trusted = "server"
    checks.one_of("trust", trusted, _TRUST)
    hidden = sorted({what for s in samplers for what in _HIDDEN.get(s, ())}, reverse=True)
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
        "noise_root": noise_root,
        "must_stay_hidden": hidden,
        "not_private": [*_NOT_PRIVATE, *also_not_private],
    }
    if exposed:
        data["dp_delta_of_masks"] = exposed
    if num_units is None and ledger.unit == "client" and ledger.num_units > 1:
        num_units = ledger.num_units
    if num_units is not None and (text := large_delta(ledger.unit, claimed, num_units)):
        data["large_delta"] = text
    if budget is not None:
        data["budget_per_unit"] = np.broadcast_to(np.asarray(budget, float), ledger.num_units)
    if mechanisms - _NOT_CONTINUOUS:
        data["floating_point"] = _FLOATING_POINT + _WAY_OUT[ledger.unit]
    if has_personal_models:
        is_covered = ledger.unit == "record" and not_covered is None
        data["kept_by_clients"] = _KEPT + (_WITHIN if is_covered else _WITHOUT_NOISE)
    if num_shared and ledger.unit == "record":
        data["shared_records"] = {
            "num_shared": num_shared,
            "most_holders": most_holders,
            **_of_all_copies(ledger, deltas, epsilon, most_holders, accountant, exposed),
        }
    if not_covered is not None:
        data["not_covered"] = not_covered
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
    samplers.add(_SAMPLERS.get(type(event), "no sampling"))
    rate = ev.sampling_rate(event)
    if rate is not None:
        noise["sampling_rate"].append(rate)
    inner = [event]
    if isinstance(event, dpa.PoissonSampledDpEvent | dpa.SampledWithoutReplacementDpEvent):
        inner = [part for part, _ in ev.flatten(event.event)]
    for part in inner:
        mechanisms.add(_MECHANISMS.get(type(part), type(part).__name__))
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
    unit = _UNITS[data["unit"]]
    largest = float(data["epsilon"])
    if not data["histories"] or not any(data["num_compositions"]):
        dp_delta = shown("dp_delta", data["dp_delta"], 6)
        return f"Nothing was released about {unit}: ε = 0 at δ = {dp_delta}.\n"
    if np.isinf(largest):
        claim = "The run is **not differentially private**: something was released without noise."
    else:
        claim = (
            f"The run is (ε, δ)-differentially private with **ε = {shown('epsilon', largest)}** at "
            f"**δ = {shown('dp_delta', data['dp_delta'], 6)}**" + _over_units(data)
        )
    if "not_covered" in data:
        claim = (
            "As a whole the run is **not differentially private**. No noise protects "
            f"{data['not_covered']}. What is counted: {claim}"
        )
    file = data.get("noise_root_file")
    root = f" The root is in `{file}` of the run folder and nowhere else." if file else ""
    noise = [words.format(_range(name, data[name])) for name, words in _NOISE.items() if data[name]]
    rate = data["sampling_rate"]
    parts = [
        f"{claim} The unit of privacy is {unit}; {_RELATIONS[data['relation']].format(unit=unit)} "
        f"(`{data['relation']}`).",
        *_large_delta(data),
        *_shared(data),
        f"Mechanism: {', '.join(data['mechanisms'])}; sampling: {_sampled(data['samplers'])}"
        + (f", at a rate of {_range('sampling_rate', rate)}" if rate else "")
        + ". "
        + "".join(noise)
        + _settings(data)
        + _composed(data),
        *_unused(data),
        _trust(data) + _hidden(data["must_stay_hidden"], data["num_compositions"]),
        *_parameters(data),
        *_masks(data),
        *_deployed(data),
        *_chosen(data),
        *([_PLANNED.format(data["planned_rounds"])] if "planned_rounds" in data else []),
        *([data["kept_by_clients"]] if "kept_by_clients" in data else []),
        _ROOTS[data["noise_root"]] + root,
        *([data["floating_point"]] if "floating_point" in data else []),
        "Not private, and not covered: " + "; ".join(data["not_private"]) + ".",
        *_computed(data),
    ]
    return "\n\n".join(parts) + "\n"


def _trust(data: dict[str, Any]) -> str:
    """Writes who is trusted; under masks a server that adds the noise sees sums alone."""
    if data["trusted"] == "server" and "secure_aggregation" in data:
        return _OF_SUMS
    return str(_TRUST[data["trusted"]])


def _sampled(samplers: list[str]) -> str:
    """Names the samplers that amplify privacy; cohorts of others are drawn too, but no secret."""
    found = [name for name in samplers if name != "no sampling"]
    text = ", ".join(found) or "none that amplifies privacy"
    return text + " (in some releases none)" * (0 < len(found) < len(samplers))


def _large_delta(data: dict[str, Any]) -> list[str]:
    """Warns of a δ that allows publishing a unit."""
    return [f"**Warning**: {data['large_delta']}."] if "large_delta" in data else []


def _composed(data: dict[str, Any]) -> str:
    """Writes how many releases an account holds, and why fewer than rounds ran."""
    low, high = min(data["num_compositions"]), max(data["num_compositions"])
    number = f"{low}" if low == high else f"{low} to {high}"
    verb = "release is" if high == 1 == low else "releases are"
    words = f"{number} {verb} composed for a unit, by the accountant `{data['accountant']}`."
    return words + _ONCE * bool(data.get("reads_once"))


def unused_of(data: Mapping[str, Any]) -> tuple[tuple[float, float], ...] | None:
    """Returns the smallest and largest of budgets, of what was spent, and of the unused shares.

    None if no budget is known, or one was exceeded or is infinite.
    """
    allowed = np.asarray(data.get("budget_per_unit", ()), float)
    spent = np.asarray(data["epsilon_per_unit"], float)
    if not allowed.size or not np.all(np.isfinite(allowed) & np.isfinite(spent)):
        return None
    share = np.clip(1 - spent / allowed, 0, 1)
    return tuple((float(each.min()), float(each.max())) for each in (allowed, spent, share))


def _unused(data: dict[str, Any]) -> list[str]:
    """Writes how much of a budget was not used."""
    found = unused_of(data)
    if found is None:
        return []
    budgets, spent, (least, most) = found
    text = f"Of a budget of ε = {_range('budget', budgets)}, {_range('epsilon', spent)} was spent"
    low, high = (math.floor(100 * share) for share in (least, most))
    if high == 0:
        return [text + "."]
    unused = f"{low} %" if low == high else f"{low} % to {high} %"
    return [
        f"{text}: {unused} of it was not used."
        + _EVERY_ROUND * bool(data.get("assumes_every_round"))
    ]


def _deployed(data: dict[str, Any]) -> list[str]:
    """Writes what a deployment trusts and assumes, where rounds ran on nodes."""
    facts = data.get("deployment")
    if facts is None:
        return []
    words = _DEPLOYED.format(keys=_DEPLOYED_KEYS[facts["keys"]])
    has_masks = data.get("secure_aggregation", {}).get("keys") == "between_nodes"
    words += _WITHOUT_MASKS * (data["trusted"] in RESTS_ON_MASKS and not has_masks)
    return [words + _SCORES * (facts.get("scores") == "exact")]


def _chosen(data: dict[str, Any]) -> list[str]:
    """Writes how a run was chosen among several, where the choice is what ε covers."""
    facts = data.get("choice")
    return [] if facts is None else [_CHOICE.format(**facts)]


def _parameters(data: dict[str, Any]) -> list[str]:
    """Writes which parameters the run did not train, and where they came from."""
    facts = data.get("parameters")
    if facts is None:
        return []
    whole, is_partial = facts["num_trained"] + facts["num_frozen"], facts["num_frozen"] > 0
    return [
        _PARAMETERS.format(whole=whole, **facts) * is_partial + _ORIGINS[facts["is_pretrained"]]
    ]


def _masks(data: dict[str, Any]) -> list[str]:
    """Writes what secure aggregation did, where a run had it, and its part of δ."""
    facts = data.get("secure_aggregation")
    if facts is None:
        return []
    k = facts["num_neighbors"]
    pairs = "masks of all pairs" if k is None else f"masks with {k} random neighbours"
    numbers = {"forms": _FORMS[facts["form"]], "pairs": pairs, "keys": _MASK_KEYS[facts["keys"]]}
    text = _SECURE.format(**numbers, **{n: facts[n] for n in ("colluders", "dropouts")})
    if "dp_delta_of_masks" in data:
        figures = facts["secrecy_failure"], data["dp_delta_of_masks"]
        one, all_rounds = (shown("dp_delta", figure) for figure in figures)
        text += _EXPOSED.format(probability=one, dp_delta=all_rounds)
    return [text]


def _shared(data: dict[str, Any]) -> list[str]:
    """Writes the claim for a record that several clients have."""
    if "shared_records" not in data:
        return []
    found = data["shared_records"]
    words = (
        f"{found['num_shared']} training records are held by more than one client, one of them by "
        f"{found['most_holders']}. The claim above is for the copy that one client has; the "
        "releases of its copies compose, and for a record as a whole "
    )
    if found["epsilon"] is None and found["by"] is not None:
        return [
            words + f"no ε is stated: the δ of its copies add up to 1 or more, by {found['by']}."
        ]
    if found["by"] is None:
        return [words + "no ε is stated: its copies share one account."]
    return [
        words + f"**ε = {shown('epsilon', found['epsilon'])}** at "
        f"δ = {shown('dp_delta', found['dp_delta'])}, by "
        f"{found['by'] if ' ' in found['by'] else 'the accountant `' + found['by'] + '`'}."
    ]


def _settings(data: dict[str, Any]) -> str:
    """Writes bound and batch, if known."""
    if data.get("contribution") is not None:
        return f"The bound on one contribution is {data['contribution']}. "
    text = ""
    clip = data.get("clip_norm_per_unit", data.get("clip_norm"))
    if clip is not None:
        text += f"The bound on one contribution is {_range('clip_norm', clip)}. "
    if data.get("initial_clip_norm") is not None:
        first = shown("initial_clip_norm", data["initial_clip_norm"])
        text += f"The bound starts at {first} and adapts. "
    if data.get("batch_size_per_unit") is not None:
        text += f"A step reads {_range('batch_size', data['batch_size_per_unit'])} records. "
    return text


def _computed(data: dict[str, Any]) -> list[str]:
    """Writes seed and versions, if known."""
    words = [f"seed {data['seed']}"] if data.get("seed") is not None else []
    words += [f"{name} {version}" for name, version in data.get("versions", {}).items()]
    return [f"Computed with {', '.join(words)}."] if words else []


def _hidden(what: list[str], counts: list[int]) -> str:
    if not what:
        # Where the table of units shows how often each was drawn.
        return _DRAWN if min(counts) < max(counts) else ""
    words = (
        f" The claim rests on sampling: {', and '.join(what)} must stay hidden from all who are "
        "not trusted."
    )
    if _COUNT in what:
        words += (
            " For anyone who learns that n of N were drawn, a unit's chance of being among them is "
            "n/N and not the stated rate; this includes a participant that sends only zeros."
        )
    return words


def _over_units(data: dict[str, Any]) -> str:
    deltas = data["dp_delta_per_unit"]
    if len(deltas) == 1:
        return "."
    if min(deltas) == max(deltas):
        return ", the largest over all units."
    return (
        ", the largest of each over all units. Every unit chose its own δ, from "
        f"{_range('dp_delta', deltas, 6)}, and its ε is that at its δ."
    )


def _range(name: str, values: ArrayLike, digits: int = 4) -> str:
    return " to ".join(ends(name, values, digits))


def ends(name: str, values: ArrayLike, digits: int = 4) -> list[str]:
    """Writes the smallest and the largest of some figures; one text if they are alike."""
    texts = (shown(name, float(end), digits) for end in (np.min(values), np.max(values)))
    return list(dict.fromkeys(texts))
