"""A stand-in for the Hugging Face Hub's buckets, on loopback, for the real clients.

It speaks what ``huggingface_hub`` asks of the Hub's REST API and what ``hf_xet`` asks of the
content-addressed store (CAS) behind it, keeps everything in memory, counts every request, and fails
on demand. Written from the two clients and from the published description of the Xet protocol; what
the real Hub does beyond that it does not know.
"""

from tests.support.hub.faults import Fault
from tests.support.hub.server import HubStandIn

__all__ = ["Fault", "HubStandIn"]
