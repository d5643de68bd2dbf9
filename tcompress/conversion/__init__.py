"""From a plan to a converted model: statistics, the goal, fits, one block at a time.

`converter` is the whole way and calls the others in order; `blocks` walks through the model, `fit`
fills what was chosen, `search` and `goal` choose under a budget. Open `converter.py` first.
"""
