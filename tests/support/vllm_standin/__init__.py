"""A stand-in of a vLLM server: its routes with their quirks over real weights in numpy arrays.

What it does with a delta it does for real, decoded by deltactl from the bucket that the
client names, so that a wrong order of steps ends in wrong bits. What vLLM is known to do badly it
does too: see vllm.py. Every request can be made to fail, before it is carried out or after; see
faults.py.
"""

from tests.support.vllm_standin.faults import Fault, How, When
from tests.support.vllm_standin.server import StandIn

__all__ = ["Fault", "How", "StandIn", "When"]
