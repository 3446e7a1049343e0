"""Other quantization tools, one process each; see benchmarks/quality.py."""
