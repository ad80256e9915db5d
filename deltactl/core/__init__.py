"""What every room may use: errors, digests, threads, progress, and the compiled inner loops.

Small, and it stays small: what comes here serves everything above and knows of nothing there, not
of tensors, files or chains. It imports no other room, never prints, and brings neither typer, rich
nor torch.

Names to call: ``errors`` (all that is raised on purpose), ``digest.hasher``,
``digest.state_digest``, ``progress.Progress``, ``threads.map_requests``, ``native``.
"""
