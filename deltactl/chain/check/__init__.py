"""Whether a link's bytes are what its header says, and whether links fit each other.

Each fault is found and named: file, tensor or step, what was expected, what was found. Nothing
here needs the step before; with it, ``replay.check`` goes on.
"""
