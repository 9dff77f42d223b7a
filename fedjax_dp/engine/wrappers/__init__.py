"""Federations made from federations."""
