"""Small models that the papers train from scratch, as ordinary Transformers models.

`import tcompress` is enough for Transformers' Auto classes to know them, see `hf.autoload`: `text`
and `grid` register what they define. Open `configs.py` first; `architecture` makes a model from a
recipe.
"""
