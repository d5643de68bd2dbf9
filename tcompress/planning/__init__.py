"""From a recipe and a model on the meta device to a plan; no weight is read.

`entries` is the plan, a flat list of frozen records; `planner` makes it out of `sites`, `depth`,
`plain_widths` and `costs`. Open `entries.py` first.
"""
