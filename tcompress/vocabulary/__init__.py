"""A model without the tokens that nobody needs: the same texts, fewer rows of its word embedding.

`choice` counts pieces in data and decides which tokens stay, `pieces` knows what the kinds of
tokenizers need to write any text, `tokenizer_files` rewrites those of a tokenizer, and `cut`
describes the smaller model, which everything else reads like any other. Open `cut.py` first.
"""
