"""Hooks into Transformers: how `from_pretrained` rebuilds a converted model.

`autoload` registers everything without importing torch, `quantizer` builds what a checkpoint's plan
names. Open `quantizer.py` first.
"""
