"""Whether a link's bytes are what its header says, and whether links fit each other.

``objects`` says which files a link has, for ``format.checker`` to hold them against their digests;
``payload`` and ``delta`` decode what those cover; ``links`` and ``trl`` compare headers. Each fault
is found and named: file, tensor or step, what was expected, what was found. Nothing here needs the
step before; with it, ``replay.check`` goes on.
"""
