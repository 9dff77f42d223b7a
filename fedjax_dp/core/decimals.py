"""Numbers in few digits for people, rounded so that bounds still hold."""

import decimal
import math

import numpy as np

# Between these sizes a number is written without an exponent.
_PLAIN = (decimal.Decimal("1e-4"), decimal.Decimal("1e6"))
_UP, _DOWN = decimal.ROUND_CEILING, decimal.ROUND_FLOOR
# Figures of privacy by the start of their names, the longer of two that begin alike first, and the
# side on which what is claimed with them still holds.
_RESULTS = {
    **{"epsilon_lower": _DOWN, "epsilon": _UP, "dp_delta": _UP, "secrecy_failure": _UP},
    **{"ε": _UP, "δ": _UP, "budget": _DOWN, "confidence": _DOWN},
}
# The same for the numbers that rounds run with, which are float32: how much noise there was, and
# how much one unit adds and how often.
_SETTINGS = {
    **{"noise_": _DOWN, "laplace_scale": _DOWN, "discrete_multiplier": _DOWN},
    **{"entry_stddev": _DOWN, "clip_norm": _UP, "initial_clip_norm": _UP},
    **{"sensitivity": _UP, "sampling_rate": _UP, "batch_size": _UP},
}


def shown(name: str, value: float | str, digits: int = 4, *, decimals: int | None = None) -> str:
    """Writes a figure for people, in significant digits, or with `decimals` after the point.

    `name` is that of a summary, a metric or a claim; of a configuration's key the last part counts.

    Guarantee: a figure of privacy is rounded to the side on which a claim still holds: ε, δ, clip
    norms and sampling rates up, noise, budgets and proven lower bounds down. A number that is a
    float32 is taken as the shortest decimal that stands for it, so that 0.1 is 0.1.
    """
    own = name.rpartition(".")[2]
    for start, side in (_RESULTS | _SETTINGS).items():
        if own.startswith(start):
            exact = _shortest(float(value)) if start in _SETTINGS else float(value)
            if decimals is not None and math.isfinite(exact):
                return _fixed(exact, decimals, side)
            return _rounded(exact, digits, side)
    return format(value, f".{digits}g" if decimals is None else f".{decimals}f")


def rounded_up(value: float, digits: int = 4) -> str:
    """Writes an upper bound, such as a spent ε, in few digits and without trailing zeros.

    Guarantee: read back as a float, the text is at least the bound, and above it by less than a
    unit of the last digit.
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def rounded_down(value: float, digits: int = 4) -> str:
    """Writes a lower bound, such as an ε that an audit proves, as `rounded_up` an upper one."""
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def unit_of_bytes(most: float) -> tuple[float, str]:
    """Chooses the decimal unit for numbers of bytes up to `most`: its bytes, and its name."""
    power = min(4, int(math.log10(max(most, 1))) // 3)
    return 1000.0**power, ("bytes", "kB", "MB", "GB", "TB")[power]


def in_bytes(count: float, digits: int = 3) -> str:
    """Writes a number of bytes in the unit that suits its size."""
    count = float(f"{count:.{digits}g}")
    size, unit = unit_of_bytes(count)
    return f"{count / size:,g} {unit}"


def _shortest(value: float) -> float:
    """Returns the float of the shortest decimal that stands for the same float32, if it is one."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _fixed(value: float, decimals: int, rounding: str) -> str:
    """Writes a number with a given count of digits after the point."""
    last = decimal.Decimal(1).scaleb(-decimals)
    # Of the largest float.
    with decimal.localcontext(prec=330 + decimals):
        return f"{decimal.Decimal(repr(value)).quantize(last, rounding=rounding):f}"


def _rounded(value: float, digits: int, rounding: str) -> str:
    value = float(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    # The shortest text that is read back as this float, so that 0.1 is 0.1.
    exact = decimal.Decimal(repr(value))
    last = decimal.Decimal(1).scaleb(exact.adjusted() - digits + 1)
    with decimal.localcontext(prec=digits + 2, rounding=rounding):
        rounded = (exact / last).to_integral_value() * last
    is_plain = _PLAIN[0] <= abs(rounded) < _PLAIN[1]
    if is_plain:
        text = f"{rounded:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    sign, written, exponent = rounded.normalize().as_tuple()
    first, *rest = map(str, written)
    power = int(exponent) + len(rest)
    return f"{'-' * sign}{first}{'.' * bool(rest)}{''.join(rest)}e{power:+03d}"
