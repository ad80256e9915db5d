"""What every room may use: errors, dtypes, digests, facts, threads, progress, inner loops.

Small, and it stays small: what comes here serves everything above and knows of nothing there, not
of files or chains. It imports no other room, never prints, and brings neither typer, rich
nor torch.

Names to call: ``errors`` (all that is raised on purpose), ``dtypes.DTYPES``, ``digest.hasher``,
``digest.state_digest``, ``facts.facts_of``, ``progress.Progress``, ``threads.map_requests``,
``native``.
"""
