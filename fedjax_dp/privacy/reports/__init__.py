"""What is reported about privacy: statements, empirical bounds, separation in noise."""

from fedjax_dp.privacy.reports import statement
from fedjax_dp.privacy.reports.separation import overlap, separation_scores

__all__ = ["overlap", "separation_scores", "statement"]
