"""Numbers in few digits for people, rounded so that bounds still hold."""

import decimal
import math

# Between these sizes a number is written without an exponent.
_PLAIN = (1e-4, 1e6)


def rounded_up(value: float, digits: int = 4) -> str:
    """Writes an upper bound, such as a spent ε, in few digits.

    Guarantee: read back as a float, the text is at least the bound, and above it by less than a
    unit of the last digit. It has no trailing zeros: "7.999", "1e-09", "8", "inf".
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def rounded_down(value: float, digits: int = 4) -> str:
    """Writes a lower bound, such as an ε that an audit proves, in few digits.

    Guarantee: read back as a float, the text is at most the bound, and below it by less than a unit
    of the last digit.
    """
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    value = float(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    # The shortest text that is read back as this float, so that 0.1 is 0.1.
    exact = decimal.Decimal(repr(value))
    last = decimal.Decimal(1).scaleb(exact.adjusted() - digits + 1)
    with decimal.localcontext(prec=digits + 2, rounding=rounding):
        found = (exact / last).to_integral_value() * last
    is_plain = _PLAIN[0] <= abs(found) < _PLAIN[1]
    if is_plain:
        text = f"{found:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    sign, written, exponent = found.normalize().as_tuple()
    first, *rest = map(str, written)
    power = int(exponent) + len(rest)
    return f"{'-' * sign}{first}{'.' * bool(rest)}{''.join(rest)}e{power:+03d}"
