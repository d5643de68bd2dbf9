"""Timing of finished models beside a dense baseline, both in turn.

`benchmark` opens models and runs the grid of `sizes`, `paired_timing` times one cell of it, with
the passes of `passes` and `generation`. What models would take that are only planned is
`tcompress.timing_model`. Open `benchmark.py` first.
"""
