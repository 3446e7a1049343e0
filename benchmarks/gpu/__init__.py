"""Measurements of a GPU beside its bounds: see __main__."""

from benchmarks.gpu import carried

carried.use()
