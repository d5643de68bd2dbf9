"""Solvers and transforms: tensors in, tensors out, and nothing known of models.

`moments` say in which norm a weight is fitted, `fits` do it; the algebra of the L-product, tensor
trains and Tucker factors have a file each. Open `moments.py` first.
"""
