"""The Python API. `import lmkit` gives its public names."""
