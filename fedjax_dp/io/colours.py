"""Colours of curves, in plots and on pages."""

# Distinct for colour-blind readers too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
