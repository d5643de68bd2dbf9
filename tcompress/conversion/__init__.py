"""The whole way of `convert`: open, plan, search, fit, write, prove.

`converter` calls everything in order, `whole_model_fits` fits what no block owns, `outputs` lists
what is written and proves it, `plain_tensors` stores it as the family does, `estimate` says before
what all takes. Open `converter.py` first.
"""
