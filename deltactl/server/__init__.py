"""The client of running vLLM servers: an update as a sequence of checked states."""
