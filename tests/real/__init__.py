"""Tests on publicly trained models that PyPI packages carry. They skip themselves until `make real-models` fetched them."""
