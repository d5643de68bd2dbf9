"""Time as a cost: what layers of a form take, and what a model of such layers takes as a whole.

Choosing a plan under a limit of time needs the time of candidates that do not exist yet. `clocks`
times dense models, layers by themselves, and models of planned forms with weights of
`random_weights`; what was timed stays in `timing_cache` for a day. Finished models are timed in
`tcompress.latency`, which this package builds on. Open `clocks.py` first.
"""
