"""Measurements behind the numbers in README and docs."""
