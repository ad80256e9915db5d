"""What ``deltactl bench`` measures, beside peers and the machine's own limits, in one run.

Names to call: ``run``, ``report``.
"""
