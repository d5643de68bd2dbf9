"""Measuring models on tasks, with intervals and paired comparisons.

A task is a class in a file by kind, an instance of it has its examples ready for one model.
`measuring` runs them. Open `measuring.py` first.
"""
