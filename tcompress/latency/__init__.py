"""Timing a forward pass beside a dense baseline, both in turn.

`benchmark` runs the grid of `sizes`, `paired_timing` times one cell of it. Open `benchmark.py`
first.
"""
