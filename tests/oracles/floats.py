"""What float32 has of exact numbers."""


def nearest(n):
    """An integer rounded to 24 bits, to even if halfway: what float32 has of it."""
    step = 1 << max(abs(n).bit_length() - 24, 0)
    multiple, rest = divmod(abs(n), step)
    multiple += 2 * rest > step or (2 * rest == step and multiple % 2)
    return (-1 if n < 0 else 1) * multiple * step
