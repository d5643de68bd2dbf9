"""The whole way of `convert`: open, plan, search, fit, write, prove.

`converter` chooses what becomes of the model and calls everything in order: `model_fits` the fits,
and what all of these pass on, `outputs` what is written and its proof. `estimate` says before what
all takes, and whether there is room. Open `converter.py` first.
"""
