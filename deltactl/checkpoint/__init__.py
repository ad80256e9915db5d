"""Checkpoints on disk: what they are, which files and tensors they have, and their state.

A path becomes named tensors, mapped and bounded, or an error that says what lies there instead.
Imports ``core``, ``files``, ``codec`` and ``format`` (a delta has to be told from a checkpoint).

Names to call: ``checkpoint.open_checkpoint``, ``checkpoint.Checkpoint``, ``state.state_of``,
``hf_directory``.
"""
