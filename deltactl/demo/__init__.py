"""What ``deltactl demo`` runs: a tiny model that trains, and the loop of trainer and server."""
