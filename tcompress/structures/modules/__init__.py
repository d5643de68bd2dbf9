"""The `nn.Module`s that hold structured weights: linear layers, embeddings, experts.

Every structure is served by the same modules; `shared` is what several of them own together. Open
`linear.py` first.
"""
