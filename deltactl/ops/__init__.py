"""What the verbs of the command line do: one verb, one module, a function that returns a report.

Prints nothing; progress goes to who asked. Imports all rooms from ``core`` to ``chain``, and no
bucket: it is handed one.

Names to call: ``diff.diff``, ``apply.apply_delta``, ``push.push``, ``pull.pull``,
``copy.copy_chain``, ``verify.verify_bucket``, ``clean.clean_bucket``, ``stats``.
"""
