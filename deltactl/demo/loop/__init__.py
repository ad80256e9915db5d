"""Reinforcement learning end to end, small enough for two cores: ``deltactl demo --loop``.

A trainer, a server, an environment, a player of rollouts and a follower, a process each. They meet
in the bucket, at the server's API and at the environment, and nowhere else.
"""
