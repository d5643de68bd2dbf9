"""Running a model block by block on data, and how far outputs are apart.

`streams` pauses forward passes at every block, `sensitivity` runs them backward for what layers
read and what a change of their outputs costs, `output_sampler` draws the gradients that begin this
and compares outputs on samples held out. Open `streams.py` first.
"""
