"""Which form every site takes: candidates with predicted losses and costs, and limits on them.

`search` is the whole way and calls the others in order: `predictions` lists the candidates of
`candidates` (of one layer `layer_losses`, of several `joint_width`, of word embeddings `bits`),
`substitution` corrects their losses, `resources` and `layer_times` say what they take, `budgets`
spends limits with `knapsack`.
`trials` compares answers that were fitted; `depth_search` finds blocks to drop.
Open `search.py` first.
"""
