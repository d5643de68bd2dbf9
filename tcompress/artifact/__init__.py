"""Models on disk: the folder of a converted model, written and read strictly.

`format` says what such a folder holds and how a plan is stored in it, `manifest` what is known of
the model. Long work is done in the folder of `workplace` and keeps its results there as files of
`disk_cache`. Open `format.py` first.
"""
