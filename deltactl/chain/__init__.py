"""A chain: the links in a bucket, in order, what may join them, and the way to a step.

Asks a bucket by the protocol in ``store``, whichever bucket it is. ``check`` holds links and their
bytes against what their headers say; ``transfer`` moves them. Imports all rooms from ``core`` to
``replay``, and no bucket.

Names to call: ``reading.read_chain``, ``chain.Chain``, ``store.Bucket``, ``anchor_policy``,
``transfer.fetching.fetched``, ``transfer.put.put_snapshot``.
"""
