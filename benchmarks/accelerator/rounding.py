"""The errors of split products on a device, as shares of the bound that privacy relies on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_dp.core.products import SPLIT, Arithmetic, computed_with, outer_products
from fedjax_dp.models.outer_products import block_size


def rows(seed: int = 0, width: int = 512) -> Iterator[dict[str, Any]]:
    """Sums outer products of numbers that round badly, and compares with float64.

    Raises:
      SystemExit: if an error is above its bound, at the end.
    """
    rng = np.random.default_rng(seed)
    with computed_with(Arithmetic("split")):
        summed, most = jax.jit(lambda *pair: outer_products(*pair)), block_size(1)
        worst = 0.0
        for terms in (1, most // 4, most):
            for family, (left, right) in _families(terms, width, rng).items():
                # Products of bfloat16 are exact: what is left are the errors of the additions.
                is_exact = family.startswith("bfloat16")
                bound = terms * SPLIT.per_addition + (0 if is_exact else SPLIT.per_product)
                # One column may be summed by another kernel.
                pairs = ((left, right), (left, right[:, :, :1]))
                share = max(_largest_error(np.asarray(summed(*p)), *p) for p in pairs) / bound
                worst = max(worst, share)
                yield {"family": family, "terms": terms, "bound": bound, "of bound": share}
    if worst > 1:
        raise SystemExit(f"Error: {worst:.3g} times the bound on the error of split products")


def _families(terms: int, width: int, rng: np.random.Generator) -> Mapping[str, Sequence[Any]]:
    shape = (terms, 1, width)
    # Lower parts of nearly 2^-8, and rests of nearly 2^-17.
    hard = np.float32(1 + 2.0**-8 - 2.0**-17 - 2.0**-17 * rng.uniform(0, 0.1, (2, *shape)))
    # A sum of 1 hides the digits of each later term, of nearly the last unit of float32.
    lost = np.full(shape, 2.0**-12 * 1.375, np.float32)
    lost[0] = 1
    narrow = np.float32(1 + rng.integers(0, 2**7, (2, *shape)) / 2**7)
    narrow = np.ldexp(narrow, rng.integers(-6, 7, narrow.shape))
    return {
        "ordinary": np.float32(rng.normal(size=(2, *shape))),
        "large parts": hard,
        "large parts, both signs": hard * np.float32(rng.choice([-1, 1], hard.shape)),
        "many scales": np.ldexp(hard, rng.integers(-12, 13, hard.shape)),
        "bfloat16": narrow,
        "bfloat16, lost digits": (lost, lost),
    }


def _largest_error(found: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    wide = [np.float64(a) for a in (left, right)]
    exact = np.einsum("bti,bto->io", *wide)
    scale = np.einsum("bti,bto->io", *map(np.abs, wide))
    return float(np.max(np.abs(found - exact) / scale))
