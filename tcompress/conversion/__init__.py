"""From a plan to a converted model: statistics, the budget, fits, one block at a time.

`converter` is the whole way and calls the others in order: `decision` spends the budget over the
`candidates` by their `sensitivity`, `blocks` walks through the model, `fit` fills what was chosen
and `outputs` lists what is written. Open `converter.py` first.
"""
