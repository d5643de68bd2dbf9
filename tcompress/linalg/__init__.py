"""Linear algebra of tcompress: tensors in, tensors out.

Solvers, fits and transforms, without a word about layers or models. Start with `moments.py`, which
says in what norm weights are fitted.
"""
