"""What a model answers to a short prompt, asked in the pause, before anybody else is answered.

Bits that read back right prove nothing of what a layer computes with beside them. So after tensors
went through vLLM's own loader all ranks compute the logits of one short prompt together. They have
to be finite and not all alike; and where no parameter or buffer has changed, those of before.

The prompt's keys and values go to block 0 of the cache, which vLLM gives to no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from deltactl.core.errors import DeltactlError, Unsupported
from deltactl.vllm.layout.proven import RESTART
from deltactl.vllm.update.peers import Peers

_TOKENS = 8
_NOISE = 2**-6
"""Of the largest logit: by how much two computations of the same may differ on an accelerator."""


@dataclass(frozen=True)
class Answer:
    """``logits``: [tokens, vocabulary] in float32, empty on a rank that gets none. ``weights``: a
    sum over this rank's parameters and buffers, by which other ones are known."""

    logits: npt.NDArray[np.float32]
    weights: int

    @property
    def fault(self) -> str:
        """What no model answers, if it is that. Noise that a norm has made zero is finite."""
        if not np.isfinite(self.logits).all():
            return "logits that are no numbers"
        flat = self.logits.size and (np.ptp(self.logits, axis=-1) == 0).any()
        return "the same logit for every token" if flat else ""

    def like(self, other: Answer) -> bool:
        """Whether the logits are the other's, but for noise."""
        if not self.logits.size:
            return True
        room = _NOISE * float(np.abs(other.logits).max())
        return bool((np.abs(self.logits - other.logits) <= room).all())


class Canary:
    """Asks the model of all ranks, ``ask`` being one rank's part; methods are collective."""

    def __init__(self, ask: Callable[[], Answer], peers: Peers) -> None:
        self._ask, self._peers = ask, peers
        self._before: Answer | None = None

    def before(self) -> None:
        """Note the answer while the weights are as they were. Raises Unsupported on all ranks where
        one of them cannot compute it: then it could not afterwards."""
        error = ""
        self._before = None
        try:
            self._before = self._ask()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        said = [theirs for theirs in self._peers.gather(error) if theirs]
        if said:
            raise Unsupported(
                "the model's answers could not be looked at after the update, and some tensors "
                "would go through vLLM's own loader",
                found=said[0],
                hint=RESTART,
            )

    def after(self) -> None:
        """Raise DeltactlError on all ranks unless the answer is as it has to be."""
        before, self._before = self._before, None
        error, now = "", None
        try:
            now = self._ask()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        error = error if now is None else now.fault
        same = before is not None and now is not None and now.weights == before.weights
        if self._peers.least(int(same)) and not error:
            assert before is not None and now is not None
            if not before.fault and not now.like(before):
                error = "other logits, though no parameter has changed"
        said = [theirs for theirs in self._peers.gather(error) if theirs]
        if said:
            raise DeltactlError(
                "after vLLM's own loader the model does not answer as it should",
                expected="finite logits of a short prompt, not all alike, and where no parameter "
                "has changed those of before",
                found=said[0],
                hint=RESTART,
            )


def ask(runner: Any) -> Answer:
    """This rank's part of the answer. ``runner``: vLLM's model runner, which computes nothing else
    meanwhile. On the thread that owns the model; raises whatever vLLM raises."""
    from vllm.forward_context import set_forward_context

    model, config, device = runner.model, runner.vllm_config, runner.device
    tokens = torch.arange(1, _TOKENS + 1, device=device, dtype=torch.int32)
    positions = torch.arange(_TOKENS, device=device, dtype=torch.int64)
    metadata, slots = _attention(runner, positions)
    places = positions.expand(3, -1) if getattr(runner, "uses_mrope", False) else positions
    with (
        torch.inference_mode(),
        set_forward_context(metadata, config, num_tokens=_TOKENS, slot_mapping=slots),
    ):
        hidden = model(
            input_ids=tokens, positions=places, intermediate_tensors=None, inputs_embeds=None
        )
        logits = model.compute_logits(hidden[0] if isinstance(hidden, tuple) else hidden)
    found = np.empty(0, np.float32) if logits is None else logits.float().cpu().numpy()
    return Answer(found, weights_sum(model))


def _attention(runner: Any, positions: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each attention layer by name what tells it that there is one request, in block 0."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = positions.device
    ends = torch.tensor([0, _TOKENS], dtype=torch.int32)
    length = torch.tensor([_TOKENS], dtype=torch.int32)
    metadata: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    for groups in runner.attn_groups:
        for group in groups:
            common = CommonAttentionMetadata(
                query_start_loc=ends.to(device),
                query_start_loc_cpu=ends,
                seq_lens=length.to(device),
                seq_lens_cpu_upper_bound=length,
                num_reqs=1,
                num_actual_tokens=_TOKENS,
                max_query_len=_TOKENS,
                max_seq_len=_TOKENS,
                block_table_tensor=torch.zeros((1, 1), dtype=torch.int32, device=device),
                slot_mapping=positions.clone(),
                positions=positions,
                is_prefilling=torch.ones(1, dtype=torch.bool),
            )
            made = group.build_metadata(common, 0)
            metadata |= dict.fromkeys(group.layer_names, made)
            slots |= dict.fromkeys(group.layer_names, common.slot_mapping)
    return metadata, slots


def weights_sum(model: nn.Module) -> int:
    """Over all parameters and buffers, by name, so that none can stand for another."""
    total = 0
    for place, (_, tensor) in enumerate((*model.named_parameters(), *model.named_buffers()), 1):
        if tensor.numel() and tensor.device.type != "meta":
            bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            total += place * int(bits.sum(dtype=torch.int64))
    return total
