"""The whole way of `convert`: open, plan, search, fit, write, prove.

`converter` calls everything in order: `choosing` what becomes of the model, `model_fits` the fits,
`outputs` what is written and its proof (`plain_tensors` as the family stores it). `conversion` is
what they pass on; `estimate` says before what all takes. Open `converter.py` first.
"""
