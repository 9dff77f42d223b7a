"""Any word for any key and option: what `--keys` says is enforced, with the key in the error."""

import collections
import math
import re

from marks import telling

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.reading import keys
from fedjax_dp.experiment.schema.constraints import ConfigError

# What a key needs beside it, so that it is read at all.
BESIDE = {
    "participation.cohort_size": "--participation.sampler=poisson",
    "participation.capacity": "--participation.sampler=poisson",
    "participation.full_participation_first": "--participation.sampler=fixed_size",
    "participation.separation": "--participation.sampler=min_separated",
    "privacy.client.bits": "--privacy.client.mechanism=discrete_gaussian",
    "privacy.client.num_deviations": "--privacy.client.mechanism=discrete_gaussian",
    "privacy.client.bands": "--privacy.client.mechanism=correlated_gaussian",
    "privacy.client.form": "--privacy.client.mechanism=oblivious",
    "privacy.client.calibration": "--privacy.client.mechanism=oblivious",
    "privacy.client.self_noise": "--privacy.client.mechanism=oblivious",
    "algorithm.aggregator_options": "--algorithm.aggregator=trimmed_mean",
}
# As a user might type them, with the value that TOML reads in them.
WORDS = {
    "-7": -7,
    "0": 0,
    "1": 1,
    "2": 2,
    "0.5": 0.5,
    "1.0": 1.0,
    "-0.5": -0.5,
    "1e300": 1e300,
    "1e999": math.inf,
    "nan": math.nan,
    "-inf": -math.inf,
    "99999999999999999999": 99999999999999999999,
    "true": True,
    "none": "none",
    "auto": "auto",
    "no such word": "no such word",
    "'quoted'": "quoted",
    "[]": [],
    "[-1, 2]": [-1, 2],
    "['a', 3]": ["a", 3],
    "{}": {},
    "{ nothing_of_this_name = 1 }": {"nothing_of_this_name": 1},
    "../..": "../..",
    "": "",
    "日本": "日本",
}


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(text):
    base, _, power = text.partition("^")
    return float(base) ** int(power or 1)


def within(value, words):
    """Whether a number is inside what words such as "above 0" or "in [0, 1)" say."""
    if not words:
        return True
    if found := re.fullmatch(r"in ([\[(])(\S+), (\S+)([\])])", words):
        low, high = number(found[2]), number(found[3])
        above = value >= low if found[1] == "[" else value > low
        return above and (value <= high if found[4] == "]" else value < high)
    if " and " in words:
        return all(within(value, part) for part in words.split(" and "))
    kind, limit = re.fullmatch(r"(?:of )?(at least|at most|above|below) (\S+)", words).groups()
    limit = number(limit)
    return {
        "at least": value >= limit,
        "at most": value <= limit,
        "above": value > limit,
        "below": value < limit,
    }[kind]


def allows(rule, value, word):
    """Whether the words that `--keys` shows let a value in."""
    if rule == "true or false":
        return isinstance(value, bool)
    is_nested = rule.startswith("a table, each value")
    alternatives = [rule] if is_nested else re.split(r" or (?!false)", rule)
    return any(_allows(one, alternatives, value, word) for one in alternatives)


def _allows(rule, alternatives, value, word):
    if rule == "none":
        return value == "none"
    if rule.startswith("one of "):
        return f"'{value}'" in rule.removeprefix("one of ").split(", ")
    if rule == "a list of these, one for each client":
        one = alternatives[alternatives.index(rule) - 1]
        return isinstance(value, list) and bool(value) and all(allows(one, v, word) for v in value)
    if rule == "a table of these by name":
        one = alternatives[0]
        entries = value.values() if isinstance(value, dict) else ()
        return bool(entries) and all(allows(one, v, word) for v in entries)
    if listed := re.fullmatch(r"a list( of at least one entry)?, each entry (.*)", rule):
        entry = listed[2]
        if not isinstance(value, list) or (listed[1] and not value):
            return False
        return all(
            isinstance(v, str) if entry == "a string" else allows(entry, v, word) for v in value
        )
    if rule == "a table":
        return isinstance(value, dict)
    if rule == "a list":
        return isinstance(value, list)
    if rule.startswith("a published list"):
        return isinstance(value, str) and re.fullmatch(r"Dist[1-9]( \* \d+(\.\d+)?)?", value)
    if rule.startswith("a kept round"):
        return isinstance(value, str) and re.fullmatch(r"last|best:\w+", value)
    if rule.startswith("a quantile"):
        return isinstance(value, str) and re.fullmatch(r"q0?\.\d*[1-9]\d*", value)
    if rule == "a path":
        return (word if word is not None else value) != "" and (
            word is not None or isinstance(value, str)
        )
    if rule == "a string":
        return word is not None or isinstance(value, str)
    if rule.startswith("a plain name"):
        # A number or a truth value on the command line is the text that was typed.
        text = value if isinstance(value, str) else word
        return bool(re.fullmatch(r"\w[\w .,=+-]*", text))
    if named := re.fullmatch(r"a table( of at least one entry)?, each value (.*)", rule):
        entry = named[2]
        if not isinstance(value, dict) or (named[1] and not value):
            return False
        return all(_allows(entry, [entry], v, word) for v in value.values())
    kind = re.fullmatch(r"(an integer|a number|a finite number)(?: (.*))?", rule)
    assert kind, f"no reading of {rule!r}"
    # Whatever the rule, runs compute in float32.
    if value == math.inf and rule.endswith("at most inf"):
        return True
    if not is_number(value) or not math.isfinite(value) or abs(value) > 3.4e38:
        return False
    if kind[1] == "an integer" and value % 1 != 0:
        return False
    return within(value, kind[2] or "")


# Keys whose value names a part have tests of their own: `test_own_parts.py`, `test_config.py`.
NAMES = {*CHOICES, "run.metrics", "participation.sampler", "privacy.client.mechanism"}
FILLED = {
    "an integer of at least 1": "2",
    "a string": "x",
    "a list, each entry a string": "['x']",
    "a list": "[1]",
}


def filled(rule):
    return next(word for start, word in FILLED.items() if rule.startswith(start))


def cases():
    """Every key and option, what it must be, and the words without which it does not exist."""
    for key, rule, *_ in keys.describe():
        if key not in NAMES and rule != "a table":
            yield key, rule, (BESIDE[key],) if key in BESIDE else ()
    for key, choice in CHOICES.items():
        for name in choice.names:
            rows = keys.describe_choice(f"{key}={name}")
            needed = {option: rule for option, rule, default, _ in rows if default == "needed"}
            for option, rule, *_ in rows:
                others = (f"--{o}={filled(r)}" for o, r in needed.items() if o != option)
                yield option, rule, (f"--{key}={name}", *others)


def enforced(tried):
    """Requires each word to be read exactly where its key's rule lets it in."""
    outcomes = collections.Counter()
    for key, rule, beside, word in tried:
        try:
            load_config(None, [*beside, f"--{key}={word}"])
            is_let_in = True
        except ConfigError as error:
            is_let_in, message = False, str(error)
            assert message.startswith("command line: ") and key in message, (key, word, message)
            assert re.search(r" must .*got | there is no ", message), (key, word, message)
        # Alone, a key for strings takes whatever is typed; the kind of an option is read later.
        is_option = any(key.startswith(f"{choice.options}.") for choice in CHOICES.values())
        allowed = allows(rule, WORDS[word], None if is_option else word)
        assert is_let_in == allowed, (key, word, rule, beside)
        outcomes[is_let_in] += 1
    return outcomes


def test_some_words_are_read_where_the_rule_of_a_key_lets_them_in():
    words = list(WORDS)
    some = [
        (*case, words[i * step % len(words)]) for i, case in enumerate(cases()) for step in (1, 7)
    ]
    outcomes = enforced(some)
    assert outcomes[False] > 200 and outcomes[True] > 40, outcomes


@telling
def test_all_words_are_read_where_the_rule_of_a_key_lets_them_in():
    outcomes = enforced((*case, word) for case in cases() for word in WORDS)
    assert outcomes[False] > 2000 and outcomes[True] > 400, outcomes
