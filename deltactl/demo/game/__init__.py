"""The game that the loop's policy learns, and what it takes to play and to learn it."""
