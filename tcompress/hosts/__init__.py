"""Small models that the papers train from scratch, as ordinary Transformers models.

`import tcompress` is enough for Transformers' Auto classes to know them, see
`integration.autoload`: each file registers what it defines.
"""
