"""From statistics and chosen forms to tensors, and the working folder that keeps them.

`layer_fits` fits the layers that read one input, `block_rewrite` those of a block to what they read
in two streams; `channel_orders` says which channels stay, `embeddings` fits tables, `first_values`
begins what is not fitted. `workdir` survives a kill. Open `layer_fits.py` first.
"""
