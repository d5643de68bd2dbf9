"""Which form every site takes: candidates with predicted losses and costs, and limits on them.

`search` is the whole way and calls the others in order: `predictions` lists the candidates of
`candidates` (of one layer `predict`, of several `width`, of word embeddings `bits`), `substitution`
corrects their losses, `resources` and `layer_times` say what they take, `budgets` spends limits
with `knapsack`.
`trials` compares answers; `depth_search`, `loss_search` and `plain_width` look for one number.
Open `search.py` first.
"""
