"""Rewrites a traced function so that convolutions and pools become GEMMs and elementwise work."""

from fedjax_dp.models.lowering.interpreter import lower

__all__ = ["lower"]
