"""Measuring models on tasks, with intervals and paired comparisons."""
