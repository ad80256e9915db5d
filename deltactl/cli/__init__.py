"""The command line: a verb, a module; what they share is in ``interface``.

The only room that prints, and the only one that imports typer and rich.

Names to call: ``app.main``.
"""
