"""What a link says: the headers of anchors and deltas, to the letter of deltactl-format(5).

The page is the law here: a field that it names is read, written and bounded in this room and in no
other. ``checker`` holds the bytes of a link's objects against it, as they come or where they lie;
what only decoding or a replay shows is checked above, in ``chain.check`` and ``replay``. Imports
``core``, ``files`` and ``codec``.

Names to call: ``checker.Checker``, ``delta.open_delta``, ``delta_header.DeltaHeader``,
``anchor.AnchorHeader``, ``delta_index``, ``header``, ``link_names``.
"""
