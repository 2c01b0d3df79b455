"""Losses and the training run. Knows models and data, never eval."""
