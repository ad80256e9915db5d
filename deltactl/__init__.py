"""Chains of anchors and sparse deltas: a trainer's weights on their way to inference servers."""

__version__ = "0.1.0"
