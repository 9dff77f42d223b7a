"""Which fact of a claim is said by which sentence, on a page (Markdown) and in a paper (LaTeX).

`SENTENCES` is the table. `in_words` and `for_paper` are its two writers, each a `Form`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from numpy.typing import ArrayLike

from fedjax_dp.core.decimals import shown
from fedjax_dp.core.foreign_text import in_latex
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms.distributed import (
    DistributedDiscreteGaussianDpEvent,
    SkellamDpEvent,
)
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, PureDpEvent, StaircaseDpEvent
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent


class Words(NamedTuple):
    """Words in both forms, empty in one that leaves them out.

    `{name}` prints a value. On a page a sentence may begin a paragraph; in a paper `~[key]` cites.
    """

    page: str
    paper: str


class Form(NamedTuple):
    """How a writer chooses among words, and writes numbers (one, or two ends) and plain text."""

    words: Callable[[Words], str]
    numbers: Callable[[Sequence[str]], str]
    text: Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class _Written:
    """Values as a form writes them, once words ask for one."""

    values: Mapping[str, Any]
    form: Form

    def words(self, words: Words) -> str:
        return self.form.words(words).format_map(self)

    def __getitem__(self, name: str) -> Any:
        value = self.values[name]
        if isinstance(value, Words):
            return self.words(value)
        if isinstance(value, list):
            return self.form.numbers(value)
        return self.form.text(value) if isinstance(value, str) else value


def sentences(claim: Mapping[str, Any], form: Form) -> list[str]:
    """Writes in a form what `SENTENCES` has for the facts of a claim."""
    if not claim["histories"] or not any(claim["num_compositions"]):
        dp_delta = ends("dp_delta", claim["dp_delta"], 6)
        return [_Written({"unit": UNITS[claim["unit"]], "dp_delta": dp_delta}, form).words(NOTHING)]
    values = _values(claim)
    written = _Written(values, form)
    said = {name: words for name, words in SENTENCES.items() if values.get(name)}
    if values["claim"] is _NOT_NOISED:
        said = {"claim": _NOT_NOISED} | {name: said[name] for name in _NO_CLAIMS if name in said}
    texts = (written.words(words) for words in said.values())
    return [text for text in texts if text]


def ends(name: str, values: ArrayLike, digits: int = 4) -> list[str]:
    """Writes the smallest and the largest of some figures; one text if they are alike."""
    figures = np.asarray(values, float)
    texts = (shown(name, float(end), digits) for end in (figures.min(), figures.max()))
    return list(dict.fromkeys(texts))


def _values(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a claim and what sentences print of them, by name."""
    deltas, counts = claim["dp_delta_per_unit"], claim["num_compositions"]
    low, high = min(counts), max(counts)
    alike = "alike" if min(deltas) == max(deltas) else "different"
    # From a file they may hold braces, which are text here.
    hidden = [what.replace("{", "{{").replace("}", "}}") for what in claim["must_stay_hidden"]]
    is_of_sums = claim["trusted"] == "server" and "secure_aggregation" in claim
    is_covered = claim["unit"] == "record" and "not_covered" not in claim
    versions = [f"{name} {version}" for name, version in claim.get("versions", {}).items()]
    noised = claim.get("noised_accuracy", {}).get("noise_multiplier")
    seed = [f"seed {claim['seed']}"] if claim.get("seed") is not None else []
    return {
        **claim,
        "claim": without_privacy(claim) or _PRIVATE,
        "epsilon": ends("epsilon", claim["epsilon"]),
        "dp_delta": ends("dp_delta", claim["dp_delta"], 6),
        "dp_deltas": ends("dp_delta", deltas, 6),
        "over": _OVER_UNITS["one" if len(deltas) == 1 else alike],
        "level": claim["unit"],
        "unit": UNITS[claim["unit"]],
        "differ": RELATIONS[claim["relation"]],
        **_copies(claim),
        **_released(claim),
        "counts": list(dict.fromkeys((str(low), str(high)))),
        "are": "release is" if high == 1 == low else "releases are",
        "analysis": _ACCOUNTANTS[claim["accountant"]],
        **_spent(claim),
        "of_law": _OF_LAW if claim.get("planned", {}).get("share") else "",
        "trust": _OF_SUMS if is_of_sums else TRUST[claim["trusted"]],
        "hidden": Words(", and ".join(hidden), " and ".join(hidden)) if hidden else None,
        "is_count_hidden": COUNT in hidden,
        # Where the table of units shows how often each was drawn.
        "is_drawn_unevenly": low < high and not hidden,
        **_parameters(claim),
        **_masks(claim),
        **_deployed(claim),
        "covers": "covers" if is_covered else "does not cover",
        "root": ROOTS[claim["noise_root"]],
        "uncovered": "; ".join(claim["not_private"]),
        "of_sweep": _OF_SWEEP if claim.get("sweep") else "",
        "of_search": _OF_SEARCH if claim.get("search") else "",
        "computed": ", ".join(seed + versions),
        "accuracy_noise": ends("noise_multiplier", noised) if noised else None,
        "changed": "; ".join(claim.get("schedules", ())),
        "own": ", ".join(f"`{name}`" for name in claim.get("own_parts", ())),
    }


def without_privacy(claim: Mapping[str, Any]) -> Words | None:
    """Returns the words for an ε that is infinite; None if it is finite."""
    if math.isfinite(float(claim["epsilon"])):
        return None
    if not _has_noise(claim):
        return _NOT_NOISED
    is_noised = MECHANISMS[dpa.NonPrivateDpEvent].page in claim["mechanisms"]
    return _NO_BOUND if is_noised and "contribution" in claim else NO_NOISE


def _has_noise(claim: Mapping[str, Any]) -> bool:
    """Returns whether any release may contain noise: what has no figure counts as noised."""
    if set(claim["mechanisms"]) - _MEASURED:
        return True
    largest = [claim[name][1] for name in NOISE if claim[name]]
    # Its event has no figure, but the numbers of the run do.
    if MECHANISMS[dpa.NonPrivateDpEvent].page in claim["mechanisms"]:
        largest += claim.get("noise_multiplier_per_unit", [math.inf])
    return max(largest) > 0


def _copies(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the claim for a record that several clients have."""
    copies = claim.get("shared_records")
    if copies is None:
        return {}
    by = copies["by"]
    if copies["epsilon"] is None:
        return {"copies": _OF_COPIES["in one account" if by is None else "too large"], "by": by}
    return {
        "copies": _OF_COPIES["stated"],
        "by": by if " " in by else f"the accountant `{by}`",
        "copies_epsilon": ends("epsilon", copies["epsilon"]),
        "copies_dp_delta": ends("dp_delta", copies["dp_delta"]),
    }


def _released(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mechanisms, samplers, noise and settings."""
    names, samplers = claim["mechanisms"], claim["samplers"]
    papers = {words.page: words.paper for words in MECHANISMS.values()}
    # A name that is not in the table is no template.
    foreign = {name: re.sub("([{}])", r"\1\1", in_latex(name)) for name in names}
    on = {words.page: words.paper for words in (NO_SAMPLING, *SAMPLERS.values())}
    # Cohorts of samplers that do not amplify privacy are drawn too, but no secret.
    amplifying = [name for name in samplers if name != NO_SAMPLING.page]
    some = " (in some releases none)" * (0 < len(amplifying) < len(samplers))
    rate = claim["sampling_rate"]
    values = {
        "names": ", ".join(names),
        "by_what": Words("{names}", _listed([papers.get(n, foreign[n]) for n in names])),
        "amplifying": (", ".join(amplifying) or "none that amplifies privacy") + some,
        "from_what": Words("{amplifying}", _listed([on[name] for name in samplers])),
        "curve": _CURVES[set(names) == {_GAUSSIAN.page}],
        "at": _RATE if rate else Words("", ""),
        **{name: ends(name, claim[name]) for name in (*NOISE, "sampling_rate") if claim[name]},
    }
    if claim.get("contribution") is None:
        clip = claim.get("clip_norm_per_unit", claim.get("clip_norm"))
        settings = {
            "bound": ("clip_norm", clip),
            "first_bound": ("initial_clip_norm", claim.get("initial_clip_norm")),
            "batch": ("batch_size", claim.get("batch_size_per_unit")),
        }
        values |= {key: ends(*of) for key, of in settings.items() if of[1] is not None}
    return values


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _spent(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was used of a budget: unless it is unknown, was exceeded or is infinite."""
    allowed = np.asarray(claim.get("budget_per_unit", ()), float)
    spent = np.asarray(claim["epsilon_per_unit"], float)
    if not allowed.size or not np.all(np.isfinite(allowed) & np.isfinite(spent)):
        return {}
    unused = np.clip(1 - spent / allowed, 0, 1)
    least, most = (math.floor(100 * share) for share in (unused.min(), unused.max()))
    return {
        "budget": ends("budget", allowed),
        "spent": ends("epsilon", spent),
        "left": _UNUSED if most else Words(".", "."),
        "unused": list(dict.fromkeys((f"{least} %", f"{most} %"))),
        "is_every_round": bool(most) and claim.get("assumes_every_round"),
    }


def _parameters(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how many parameters there are, and where those came from that are not trained."""
    counts = claim.get("parameters")
    if counts is None:
        return {}
    return {
        "whole": counts["num_trained"] + counts["num_frozen"],
        "partial": _PARTIAL if counts["num_frozen"] > 0 else "",
        "origin": _ORIGINS[counts["is_pretrained"]],
    }


def _masks(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what secure aggregation did, and its part of δ."""
    masks = claim.get("secure_aggregation")
    if masks is None:
        return {}
    values = {
        "did": _FORMS[masks["form"]],
        "pairs": _ALL_PAIRS if masks["num_neighbors"] is None else _NEIGHBOURS,
        "mask_keys": _MASK_KEYS[masks["keys"]],
    }
    if "dp_delta_of_masks" in claim:
        values["mask_fails"] = ends("dp_delta", masks["secrecy_failure"])
        values["masks_fail"] = ends("dp_delta", claim["dp_delta_of_masks"])
    return values


def _deployed(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what holds where rounds ran on nodes."""
    deployment = claim.get("deployment")
    if deployment is None:
        return {}
    has_masks = claim.get("secure_aggregation", {}).get("keys") == "between_nodes"
    return {
        "node_keys": _DEPLOYED_KEYS[deployment["keys"]],
        "is_open": claim["trusted"] in RESTS_ON_MASKS and not has_masks,
        "is_exact": deployment.get("scores") == "exact",
    }


# Trust under which a message by itself has too little noise.
RESTS_ON_MASKS = ("secure_aggregation", "honest_but_curious", "gamma_shares")
UNITS = {
    "client": Words("one client with all of its data", "all data of one client"),
    "record": Words("one record of one client", "one record of one client"),
}
RELATIONS = {
    "add_remove": Words(
        "neighbouring data differ by {unit}, which is present or absent",
        "Neighbouring data sets differ by {unit}, which is present or absent.",
    ),
    "zero_out": Words(
        "neighbouring data differ by {unit}, whose contributions are replaced by zeros. The unit "
        "still counts towards the numbers of clients and records. These are public because rates, "
        "steps and divisors are computed from them",
        "Neighbouring data sets differ by {unit}, whose contributions are replaced by "
        "zeros~[kairouz2021practical]; the numbers of clients and records are public.",
    ),
    "replace_one": Words(
        "neighbouring data differ by {unit}, which is exchanged for any other",
        "Neighbouring data sets differ by {unit}, which is exchanged for any other.",
    ),
}
TRUST = {
    "server": Words(
        "The server is trusted: it sees every clipped contribution and adds the noise. The claim "
        "holds against all who see only the released models.",
        "The server is trusted and the guarantee holds against all who see only released models.",
    ),
    "client": Words(
        "Only the client itself is trusted: its noise is added before anything leaves it. "
        "The claim holds against the server and everyone else.",
        "Each client adds its own noise and trusts only itself; the guarantee holds against the "
        "server and all others.",
    ),
    "pool": Words(
        "Whoever holds the data is trusted: the records of all clients were gathered in one place. "
        "The claim holds against all who see only the released models.",
        "The records of all clients were gathered in one place, whose holder is trusted.",
    ),
    "secure_aggregation": Words(
        "Secure aggregation is trusted: a single message carries too little noise to protect "
        "anyone. It is assumed that at least the accounted number of shares of the noise is added, "
        "one by every client. If cohorts vary, the summing party adds the missing ones, which it "
        "knows.",
        "Secure aggregation~[bonawitz2017practical] is trusted, and at least the accounted "
        "number of shares of the noise is assumed to be in each sum.",
    ),
    "honest_but_curious": Words(
        "The server is honest but curious: it follows the protocol, and learns of a cohort's "
        "messages nothing but their sum. As many clients as are stated below may collude with it "
        "and subtract the shares of the noise that they added; only those of the others count.",
        "The server is honest but curious and sees sums only~[bonawitz2017practical,bell2020secure]"
        "; the accounted noise is that of the clients that do not collude with it.",
    ),
    "gamma_shares": Words(
        "Every party is trusted to add its shares of the noise and to keep secret the shares that "
        "it knows. The protocol, which the server is trusted to follow, shows it only masked "
        "messages. The claim holds against all who see only the sums. It does not hold against a "
        "coalition of parties, which can subtract the shares that its members know, nor against a "
        "server that fakes parties (a Sybil attack) and knows how it permuted the shares. That "
        "would take a secure shuffle, which is not implemented.",
        "Every party is trusted to add its shares of the noise and to keep those of others secret, "
        "and the server to follow the protocol. A coalition of parties can subtract its shares.",
    ),
    "selection": Words(
        "The server and those who run the trials are trusted: they see every trial, and how many "
        "there were. The claim holds against all who see only what is published of the best one.",
        "The server and those who run the trials are trusted; the guarantee holds for what is "
        "published of the chosen run.",
    ),
}
_OF_SUMS = Words(
    "The server is trusted: it sees the sum of all clipped contributions and adds the noise. The "
    "claim holds against all who see only the released models.",
    TRUST["server"].paper,
)
ROOTS = {
    "seed": Words(
        "The noise is a function of the seed of the run, `run.seed` in `config.toml`. Anyone who "
        "has it can reproduce the noise and subtract it, and the claim does not hold against them. "
        "Runs that share a seed share noise, so that publishing two of them may cancel it. "
        "`run.secret = true` draws the noise from a secret root instead.",
        "The noise is pseudorandom from a seed: the guarantee does not hold against those who have "
        "the seed.",
    ),
    "secret": Words(
        "Cohorts, batches and noise were drawn from a secret root from the operating system, "
        "which no other run shares. It must be destroyed or kept secret, with everything "
        "saved beside it: anyone who has the root can subtract the noise. The root has as many "
        "bits as a key of JAX, 64 by default, and JAX's generator is not cryptographic. The claim "
        "holds against those who cannot search that many keys.",
        "The noise is pseudorandom from a secret key of 64 bits, drawn from the operating system.",
    ),
    "nodes": Words(
        "The noise was drawn on the nodes, each from a root of its own from its operating system, "
        "which the server never has. A node must keep its root secret, with everything saved "
        "beside it: anyone who has it can subtract the noise of the node's clients. A root has as "
        "many bits as a key of JAX, 64 by default, and JAX's generator is not cryptographic. The "
        "claim holds against those who cannot search that many keys. The server's root of the run "
        "gives what the server draws and cohorts that may be known, but no noise of a node. "
        "Cohorts that must stay hidden are drawn with further random bits in each round, which "
        "are not saved, but `checkpoint` in the run folder lists who was drawn.",
        "The noise is pseudorandom from secret keys of 64 bits, drawn from the operating systems "
        "of the nodes.",
    ),
}
_GAUSSIAN = Words("Gaussian noise", "Gaussian noise~[dwork2014algorithmic]")
MECHANISMS: dict[type[DpEvent], Words] = {
    dpa.GaussianDpEvent: _GAUSSIAN,
    dpa.TruncatedSubsampledGaussianDpEvent: _GAUSSIAN,
    dpa.LaplaceDpEvent: Words("Laplace noise", "Laplace noise~[dwork2006calibrating]"),
    dpa.ZCDpEvent: Words("releases with a zCDP cost", "releases with a zCDP cost"),
    dpa.RandomizedResponseDpEvent: Words(
        "randomised response", "randomised response~[warner1965randomized]"
    ),
    standard.DiscreteLaplaceDpEvent: Words("discrete Laplace noise", "discrete Laplace noise"),
    dpa.NonPrivateDpEvent: Words("releases without privacy", "releases without privacy"),
    DistributedDiscreteGaussianDpEvent: Words(
        "discrete Gaussian noise",
        "discrete Gaussian noise~[canonne2020discrete,kairouz2021distributed]",
    ),
    SkellamDpEvent: Words("Skellam noise", "Skellam noise~[agarwal2021skellam]"),
    PureDpEvent: Words("mechanisms that are ε-DP", r"mechanisms that are $\varepsilon$-DP"),
    BoundedRangeDpEvent: Words(
        "private selection by the exponential mechanism",
        "the exponential mechanism~[mcsherry2007mechanism,dong2020optimal]",
    ),
    StaircaseDpEvent: Words("staircase noise", "staircase noise~[geng2015staircase]"),
    GammaSharesDpEvent: Words("Laplace noise in gamma shares", "Laplace noise in gamma shares"),
    BoundedLaplaceDpEvent: Words("bounded Laplace noise", "bounded Laplace noise~[geng2020tight]"),
}
NO_SAMPLING = Words("no sampling", "without amplification by sampling")
SAMPLERS: dict[type[DpEvent], Words] = {
    dpa.PoissonSampledDpEvent: Words("Poisson sampling", "on Poisson samples{curve}"),
    dpa.SampledWithoutReplacementDpEvent: Words(
        "fixed-size sampling without replacement",
        "on samples of fixed size without replacement~[wang2019subsampled]",
    ),
    dpa.TruncatedSubsampledGaussianDpEvent: Words(
        "Poisson sampling truncated to a capacity",
        "on Poisson samples truncated to a capacity~[chua2024scalable]",
    ),
}
# What amplification by sampling assumes hidden. Without replacement the number is public.
WHO, COUNT = "which units were drawn", "how many units were drawn"
HIDDEN = {
    SAMPLERS[dpa.PoissonSampledDpEvent].page: (WHO, COUNT),
    SAMPLERS[dpa.TruncatedSubsampledGaussianDpEvent].page: (WHO, COUNT),
    SAMPLERS[dpa.SampledWithoutReplacementDpEvent].page: (WHO,),
}
# Where the curve of a mechanism on Poisson samples is from: of Gaussian noise alone, and of others.
_CURVES = {
    True: Words("", "~[abadi2016deep,mironov2019renyi]"),
    False: Words("", "~[zhu2019poisson]"),
}
NOISE = ("noise_multiplier", "laplace_scale", "discrete_multiplier", "entry_stddev")
# Mechanisms whose noise has one of these figures, or the numbers of the run.
_MEASURED = {
    MECHANISMS[kind].page
    for kind in (
        dpa.GaussianDpEvent,
        dpa.LaplaceDpEvent,
        dpa.NonPrivateDpEvent,
        DistributedDiscreteGaussianDpEvent,
        SkellamDpEvent,
        StaircaseDpEvent,
        GammaSharesDpEvent,
        BoundedLaplaceDpEvent,
    )
}
_RENYI = r"in R\'enyi differential privacy~[mironov2017renyi]"
_ACCOUNTANTS = {
    "rdp": Words("", _RENYI),
    "rdp-classic-64": Words("", _RENYI + " (integer orders up to 64)"),
    "pld": Words(
        "",
        "by privacy loss distributions~[koskela2020computing,doroshenko2022connect], or in "
        r"R\'enyi differential privacy where that is tighter~[mironov2017renyi]",
    ),
}
NO_NOISE = Words(
    "The run is **not differentially private**: something was released without noise.",
    "The run is not differentially private: something was released without noise.",
)
_NOT_NOISED = Words(
    "The run is **not differentially private** at the level of {level}s: no noise was added to "
    "protect them, so there is no guarantee.",
    "The run is not differentially private at the level of {level}s: no noise was added to protect "
    "them, so there is no guarantee.",
)
_NO_BOUND = Words(
    "The run is **not differentially private**: no guarantee follows from its noise, since no "
    "bound on what one unit contributes is known.",
    "The run is not differentially private: no guarantee follows from its noise, since no bound on "
    "what one unit contributes is known.",
)
_PRIVATE = Words(
    "The run is (ε, δ)-differentially private with **ε = {epsilon}** at **δ = {dp_delta}**{over}",
    r"Training is $(\varepsilon, \delta)$-differentially private~[dwork2014algorithmic] at the "
    r"level of {level}s, with $\varepsilon = {epsilon}$ and $\delta = {dp_delta}${over}",
)
_OVER_UNITS = {
    "one": Words(".", "."),
    "alike": Words(", the largest over all units.", ", the largest over all units."),
    "different": Words(
        ", the largest of each over all units. Every unit chose its own δ, from {dp_deltas}, and "
        "its ε is that at its δ.",
        ", the largest over all units.",
    ),
}
_OF_COPIES = {
    "stated": Words(
        "**ε = {copies_epsilon}** at δ = {copies_dp_delta}, by {by}.",
        r"$\varepsilon = {copies_epsilon}$ at $\delta = {copies_dp_delta}$.",
    ),
    "too large": Words(
        "no ε is stated: the δ of its copies add up to 1 or more, by {by}.",
        r"no $\varepsilon$ is claimed.",
    ),
    "in one account": Words(
        "no ε is stated: its copies share one account.", r"no $\varepsilon$ is claimed."
    ),
}
_FORMS = {
    "masked": "every mask was made and removed",
    "cancelled": "masks, which leave no trace in a sum, were left out of the simulation",
}
_SIMULATED = (
    "Key agreement and masks are simulated, and the guarantee assumes that a deployment has them."
)
_MASK_KEYS = {
    "simulated": Words(
        "Key agreement is simulated: seeds of masks follow from the run's public keys.", _SIMULATED
    ),
    "agreed": Words(
        "Seeds of masks were agreed by X25519 and HKDF, within one process.", _SIMULATED
    ),
    "between_nodes": Words(
        "Seeds of masks were agreed by X25519 and HKDF between the clients on their nodes, with "
        "new keys in each round. The server carried the public keys: one that exchanges them can "
        "stand between two nodes, and against it messages are not secret. A seed has 64 bits, and "
        "masks are streams of Threefry, which is not a cryptographic generator: messages are "
        "secret from those who cannot search that many seeds.",
        "",
    ),
}
_DEPLOYED_KEYS = {
    "device": "Each node draws the keys of its clients from its operating system.",
    "parity": (
        "The server made the keys of all clients, as tests need it: it can subtract all noise that "
        "clients add, and must be trusted."
    ),
}
_UNUSED = Words(": {unused} of it was not used.", ".")
_OF_LAW = Words(", the {planned[share]}-quantile of how often one is drawn", "")
# A page has them among what is not private.
_OF_SWEEP = Words("", " or of this run among the {sweep} or more of a sweep{of_search}")
_OF_SEARCH = Words("", ", whose settings {search} chose by their results")
_RATE = Words(", at a rate of {sampling_rate}", ", at a rate of ${sampling_rate}$")
_ALL_PAIRS = Words("masks of all pairs", "one for each pair of clients")
_NEIGHBOURS = Words(
    "masks with {secure_aggregation[num_neighbors]} random neighbours",
    "with {secure_aggregation[num_neighbors]} random neighbours each",
)
_PARTIAL = Words(
    "Of the model's {whole:,} parameters {parameters[num_trained]:,} are trained; "
    "{parameters[num_frozen]:,} are frozen, and neither noised nor sent. ",
    "",
)
_ORIGINS = {
    True: "The run started from parameters in a file; no ε here covers data that they were "
    "trained on.",
    False: "They have the initial values of the seed.",
}
NOTHING = Words(
    "Nothing was released about {unit}: ε = 0 at δ = {dp_delta}.",
    "Nothing was released about {unit}.",
)
# Sentences that hold where there is no noise: all others are about noise, or what a claim rests on.
_NO_CLAIMS = ("parameters", "secure_aggregation", "mask_keys", "computed")
# In the order of both forms; each is said where a claim, or `_values` of it, has that entry.
SENTENCES = {
    "not_covered": Words(
        "As a whole the run is **not differentially private**. No noise protects {not_covered}. "
        "What is counted:",
        "As a whole the run is not differentially private: no noise protects {not_covered}.",
    ),
    "claim": Words("{claim} The unit of privacy is {unit}; {differ} (`{relation}`).", "{claim}"),
    "large_delta": Words("\n\n**Warning**: {large_delta}.", "{large_delta}."),
    # On a page it stands before the warning, with the claim.
    "relation": Words("", "{differ}"),
    "shared_records": Words(
        "\n\n{shared_records[num_shared]} training records are held by more than one client, one "
        "of them by {shared_records[most_holders]}. The claim above is for the copy that one "
        "client has; the releases of its copies compose, and for a record as a whole {copies}",
        "Of a record up to {shared_records[most_holders]} clients have a copy; for all of its "
        "copies {copies}",
    ),
    "mechanisms": Words(
        "\n\nMechanism: {by_what}; sampling: {from_what}{at}.",
        "Releases use {by_what} {from_what}{at}.",
    ),
    "noise_multiplier": Words(
        "The Gaussian noise has a standard deviation of {noise_multiplier} times the largest "
        "contribution of one unit.",
        "The Gaussian noise has a standard deviation of ${noise_multiplier}$ times the largest "
        "contribution of one unit.",
    ),
    "laplace_scale": Words(
        "The Laplace noise has a scale of {laplace_scale} times the largest L1 norm of one unit's "
        "contribution.",
        r"The Laplace noise has a scale of ${laplace_scale}$ times the largest $\ell_1$ norm of a "
        "contribution.",
    ),
    "discrete_multiplier": Words(
        "The discrete noise in a sum has a scale of {discrete_multiplier} times the largest L2 "
        "norm of one unit's contribution, both on the lattice.",
        "The discrete noise in a sum has a scale of ${discrete_multiplier}$ times the largest "
        r"$\ell_2$ norm of a contribution, both on the lattice.",
    ),
    "entry_stddev": Words(
        "Every entry has separate noise, with a standard deviation of {entry_stddev} times the "
        "bound on that entry.",
        "Each entry has its own noise, with a standard deviation of ${entry_stddev}$ times its "
        "bound.",
    ),
    "contribution": Words("The bound on one contribution is {contribution}.", ""),
    "bound": Words(
        "The bound on one contribution is {bound}.",
        "Contributions are clipped to a norm of ${bound}$.",
    ),
    "first_bound": Words("The bound starts at {first_bound} and adapts.", ""),
    "batch": Words("A step reads {batch} records.", ""),
    "counts": Words(
        "{counts} {are} composed for a unit, by the accountant `{accountant}`.",
        "For each unit ${counts}$ {are} composed, {analysis}, with the events of "
        r"dp-accounting~[dpaccounting] as the simulator fedjax\_dp charged them~[fedjaxdp].",
    ),
    "reads_once": Words(
        "Each record is read in one round only: its client pays for that round, and not for the "
        "other rounds that it takes part in.",
        "Each record is read in one round only, and its client pays for that round alone.",
    ),
    "budget": Words(
        "\n\nOf a budget of ε = {budget}, {spent} was spent{left}",
        r"Of a budget for $\varepsilon$ of ${budget}$, ${spent}$ was spent.",
    ),
    "is_every_round": Words(
        "The noise was calibrated as if every client took part in every round; clients that were "
        "drawn less often spend less.",
        "",
    ),
    "planned": Words(
        "The noise was calibrated for {planned[count]} rounds of a client{of_law}. A client is "
        "left out of each round that would exceed its budget, by its own account, which depends on "
        "sizes, numbers and earlier draws, and on no record.",
        "Noise was calibrated for ${planned[count]}$ rounds of a client, which took part no "
        "further once its budget was used.",
    ),
    "trust": Words("\n\n{trust}", "{trust}"),
    "hidden": Words(
        "The claim rests on sampling: {hidden} must stay hidden from all who are not trusted.",
        "It assumes that {hidden} stay hidden.",
    ),
    "is_count_hidden": Words(
        "For anyone who learns that n of N were drawn, a unit's chance of being among them is n/N "
        "and not the stated rate. This includes a participant that sends only zeros.",
        "",
    ),
    "is_drawn_unevenly": Words(
        "How often each unit was drawn is no secret: draws depend on no data, and the claim does "
        "not rest on them.",
        "",
    ),
    "changed": Words(
        "\n\nNumbers of the run changed over rounds: {changed}. Each round is charged by those it "
        "ran with.",
        "Some numbers of training changed over rounds, each of which is charged by its own.",
    ),
    "own": Words(
        "\n\nCode that is not of this package takes part: {own}. It is trusted to do what it "
        "declares.",
        "Parts of the run are code of its own, which is trusted to do what it declares.",
    ),
    "parameters": Words("\n\n{partial}{origin}", ""),
    "secure_aggregation": Words(
        "\n\nSecure aggregation: {did}, under {pairs}. It protects as long as the number of "
        "clients of a round that collude with the server is at most "
        "{secure_aggregation[colluders]}. If more than {secure_aggregation[dropouts]} drop out, "
        "the round is lost.",
        "Messages are under pairwise masks, {pairs}: they stay secret while at most "
        "{secure_aggregation[colluders]} of the clients of a round collude with the server, and a "
        "sum is found while at most {secure_aggregation[dropouts]} drop out.",
    ),
    "mask_keys": Words("{mask_keys}", "{mask_keys}"),
    "masks_fail": Words(
        "In a round, the random graph of masks fails to keep messages secret with a probability "
        "of at most {mask_fails}; δ includes {masks_fail} for all rounds.",
        "The random graph of masks fails with a probability of at most ${masks_fail}$ over all "
        r"rounds, which $\delta$ includes~[bell2020secure].",
    ),
    "deployment": Words(
        "\n\nDeployed on Flower: clips and noise of clients are made on the nodes, which are "
        "trusted to make them as agreed, and by the clients of a node to keep their updates to "
        "themselves. Nodes run the app and the configuration that the person who starts the run "
        "sends them. The claim trusts that person, except for nodes that run signed apps alone, "
        "with a configuration of their own. {node_keys} A client whose node is offline when it is "
        "drawn, or whose reply does not fit, sends nothing. The claim assumes that this depends "
        "neither on the model nor on who else is drawn. The SuperLink's log and database record "
        "who was messaged: those who read them must keep it secret. Rounds whose messages were "
        "sent are charged, including those whose outcome was lost.",
        "Rounds ran on clients' own machines~[beutel2020flower], which are trusted to clip and to "
        "add noise as agreed. It is assumed that whether a client answers depends neither on the "
        "model nor on who else was drawn.",
    ),
    "is_open": Words(
        "Nodes agreed on no keys of masks. The server can read the message of each node by "
        "itself, and the claim does not hold against a server that does so before it adds them up.",
        "There were no masks between the clients: the server is trusted to add messages up unread.",
    ),
    "is_exact": Words(
        "Training scripts of participants report exact scores, which no noise protects and no ε "
        "covers: the server has them in `scores.jsonl`.",
        r"The server has exact scores of participants, which $\varepsilon$ does not cover.",
    ),
    "choice": Words(
        "\n\nThe run is the best by {choice[score]} of a random number of runs, each of a setting "
        "drawn at random among {choice[points]}. Their number has a truncated negative binomial "
        "distribution of mean {choice[mean]:g} and shape {choice[shape]:g} (Papernot and Steinke "
        "2022). ε is that of all runs and of the choice. It holds if the chosen run's release and "
        "its setting are published, and neither the other runs nor how many there were. Records "
        "that the score is computed on are not protected.",
        "The run was chosen among {choice[points]} settings by random repetition of mean "
        r"{choice[mean]:g} and shape {choice[shape]:g}, which $\varepsilon$ "
        "includes~[papernot2022hyperparameter].",
    ),
    "planned_rounds": Words(
        "\n\nThe run ended early, by a rule on what it had released. Any of its {planned_rounds} "
        "planned rounds could have been the last, and ε is that of all of them.",
        r"Training ended early by a rule on released values; $\varepsilon$ is that of all "
        "{planned_rounds} planned rounds.",
    ),
    "noised_accuracy": Words(
        "\n\nThe metric `noised_client_accuracy` is released after evaluations. The clients' "
        "accuracies, each in [0, 1], are summed with Gaussian noise of {accuracy_noise} times the "
        "most that one client adds, over the number of clients. Each release is charged to all "
        "clients without amplification, and choices by this metric cost no more.",
        "The clients' mean accuracy was released with Gaussian noise of "
        "${accuracy_noise}$ times the most that one client adds to the sum, "
        r"and $\varepsilon$ includes these releases and choices by them.",
    ),
    "kept_by_clients": Words(
        "\n\n{kept_by_clients}",
        r"$\varepsilon$ {covers} the models that clients have for themselves.",
    ),
    "states_of_clients": Words(
        "\n\n{states_of_clients}",
        r"Clients have states of their own, which never leave them; $\varepsilon$ does not cover "
        "these.",
    ),
    "root": Words("\n\n{root}", "{root}"),
    "noise_root_file": Words(
        "The root is in `{noise_root_file}` of the run folder and nowhere else.", ""
    ),
    "floating_point": Words(
        "\n\n{floating_point}",
        "The analysis is for real-valued noise; the implementation is in floating "
        "point~[mironov2012significance,casacuberta2022widespread,haney2022precision].",
    ),
    "not_private": Words(
        "\n\nNot private, and not covered: {uncovered}.",
        r"Metrics of training and evaluation were computed exactly, and $\varepsilon$ covers "
        "neither them nor choices made from the data outside of the run, such as of "
        "hyper-parameters{of_sweep}.",
    ),
    "computed": Words("\n\nComputed with {computed}.", ""),
}
