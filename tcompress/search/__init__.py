"""Which form every site takes: candidates with predicted losses and costs, and limits on them.

`search` is the whole way and calls the others in order: `predictions` lists the `candidates` of
every layer, and of several together, `bits` those of word embeddings; `corrections` tries some.
`resources` says what candidates take, and `budgets` spends limits with `knapsack`. `depth_search`
finds blocks to drop. Open `search.py` first.
"""
