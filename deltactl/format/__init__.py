"""What a link says: the headers of anchors and deltas, to the letter of deltactl-format(5).

The page is the law here: a field that it names is read, written and bounded in this room and in no
other. Whether the tensors are what the header says is checked above, in ``chain.check`` and
``replay``. Imports ``core``, ``files`` and ``codec``.

Names to call: ``delta.open_delta``, ``delta_header.DeltaHeader``, ``anchor.AnchorHeader``,
``delta_index``, ``header``, ``link_names``.
"""
