"""The command line: one file for each command.

Modules here import neither torch nor transformers nor the recipe models at the top: help and
completion answer at once. Commands import what they need when they run.
"""
