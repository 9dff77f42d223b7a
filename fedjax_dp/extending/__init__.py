"""Tools for algorithms, aggregators and wrappers of your own.

Declarations are in `fedjax_dp.algorithms`, `clients`, `server` and `engine`; here are checks of
arguments, ranges of numbers, arithmetic on trees, and parts of messages that are not sent whole.
"""

from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Choices, Coded, Form, Known, SentIf
from fedjax_dp.core.trees import PyTree

__all__ = [
    "Choices",
    "Coded",
    "Form",
    "Known",
    "PyTree",
    "SentIf",
    "Sparse",
    "checked",
    "ranges",
    "trees",
]
