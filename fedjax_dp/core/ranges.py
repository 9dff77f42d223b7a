"""Ranges of numbers, as types: what an option may be is read off its annotation."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

# Above 0.
Positive = Annotated[float, Gt(0)]
# At least 0.
NonNegative = Annotated[float, Ge(0)]
# In [0, 1].
Fraction = Annotated[float, Ge(0), Le(1)]
# In (0, 1].
Probability = Annotated[float, Gt(0), Le(1)]
# In [0, 1), such as what an average keeps of its past.
Decay = Annotated[float, Ge(0), Lt(1)]
# A whole number of at least 1.
Count = Annotated[int, Ge(1)]
# A whole number of at least 0.
Index = Annotated[int, Ge(0)]
# In (0, 1), such as δ, or a share that leaves something.
ProperFraction = Annotated[float, Gt(0), Lt(1)]
