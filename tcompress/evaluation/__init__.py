"""Measuring models on tasks, with intervals and paired comparisons.

`task_base` says what a task is, the tasks stand in files by kind, `measuring` runs them. Open
`measuring.py` first.
"""
