"""Deltas upon a base: the states that they lead to, in memory or written out, every bit checked.

Works on checkpoints and deltas that are on this machine; where they came from is the business of
the rooms above. Memory is bounded by the blocks in flight. Imports ``core``, ``files``, ``codec``,
``format`` and ``checkpoint``.

Names to call: ``states``, ``rebuild``, ``in_memory``, ``compare``, ``check``.
"""
