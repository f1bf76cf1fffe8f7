"""Exclusive Self Attention: operator, modules and models."""

__version__ = "0.1.0"
