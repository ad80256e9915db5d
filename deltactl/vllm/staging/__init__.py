"""Deltas made ready against live weights and written in the pause; live weights summed."""
