"""Suites, acceptance metrics, calibration, scheduling, reports. Knows models and data, never train."""
