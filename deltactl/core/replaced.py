"""Links that keep nothing of the step before: to be told of, as another model may have begun."""

from __future__ import annotations

from deltactl.core.anchor import AnchorHeader
from deltactl.core.chain import Chain, Link
from deltactl.core.chain_model import tensors_at
from deltactl.core.delta_header import DeltaHeader
from deltactl.core.digest import TensorState
from deltactl.core.errors import DeltactlError


def replaces_all(chain: Chain, link: Link) -> bool:
    """Whether a link leaves no tensor of the step below as it is, nor changes one in part.

    A delta that carries all tensors whole, and every element of them changed; an anchor where no
    delta leads to its step and no tensor is as it was. False where the step below is not known.
    """
    if isinstance(link.header, DeltaHeader):
        return link.header.replaces_all
    below = chain.below(link.step)
    if below is None or link.step in chain.deltas:
        return False
    return _begins_anew(chain, link.header, below)


def _begins_anew(chain: Chain, header: AnchorHeader, below: int) -> bool:
    try:
        before = tensors_at(chain, below)
    except DeltactlError:  # what is wrong with the chain is not for here
        return False
    kept = (tensor for tensor in header.tensors if _same(before.get(tensor.name), tensor))
    return bool(before) and next(kept, None) is None


def _same(before: TensorState | None, after: TensorState) -> bool:
    """By digest; of TRL's, which have none, by dtype and shape."""
    if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    return before.digest in ("", after.digest) or not after.digest
