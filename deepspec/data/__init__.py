"""Prompts → responses → target cache → batches. Knows models, never train or eval."""
