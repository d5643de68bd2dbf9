"""Converted models in other formats."""
