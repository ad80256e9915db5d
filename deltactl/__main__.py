"""``python -m deltactl``."""

from deltactl.cli.app import main

main()
