"""What is on disk: the folder of a converted model, written and read strictly.

`format` says what such a folder holds and how a plan is stored in it, `manifest` what is known of
the model. Open `format.py` first.
"""
