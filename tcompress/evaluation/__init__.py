"""Measuring models on tasks, with intervals and paired comparisons.

A task is a class in a file by kind (`labelled_tasks`, `embedding_tasks`, `language_modeling`,
`sequence_to_sequence`, on `task_base`); an instance has its examples prepared for one model.
`statistics` has numbers and their intervals, `scores` comparisons. Open `measuring.py`, which runs
them, first.
"""
