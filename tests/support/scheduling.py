"""Which tests run in one process of pytest-xdist: those that share a real vLLM server.

Marks of ``--dist loadgroup`` would say the same, but pytest 9.2 does not let xdist 3.8 put them
into the names of tests, by which it goes.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.support.vllm_fixtures import SETUPS


class ServerScheduling(LoadScopeScheduling):
    """Tests of one setup together; others module by module."""

    def _split_scope(self, nodeid: str) -> str:
        named = (str(setup) for setup in SETUPS if str(setup) in nodeid)
        return next(named, None) or super()._split_scope(nodeid)
