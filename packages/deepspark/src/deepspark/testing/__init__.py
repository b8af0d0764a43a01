"""Checks that deepspark ships: golden vectors run against an installed copy, and how other engines schedule."""

from deepspark.testing.vectors import VectorReport, run_vectors

__all__ = ["VectorReport", "run_vectors"]
