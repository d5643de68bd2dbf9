"""Calibration data, and the paused forward passes that carry it through a model."""
