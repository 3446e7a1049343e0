"""Hooks: an operator's code before and after generation, in processes of its own (docs/hooks.md)."""
