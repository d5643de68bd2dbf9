"""The command line: one thin file for each command, `flags` for what they share.

Modules here import neither torch nor transformers nor the recipe models at the top: help and
completion answer at once. Commands import what they need when they run. Open `main.py` first.
"""
