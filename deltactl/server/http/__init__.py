"""Requests to one vLLM server, each answered in bounded time or told why not."""
