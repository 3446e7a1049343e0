"""Measurements of a GPU beside its bounds: see __main__."""
