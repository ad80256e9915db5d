"""One update of a running server, rank by rank: state, phases, agreement, and the checks after."""
