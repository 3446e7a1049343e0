"""Benchmarks: offline through the engine, online against any OpenAI-compatible server. See docs/bench.md."""
