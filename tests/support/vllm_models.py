"""Small checkpoints that a real vLLM serves: random bf16 weights, a config and a tokenizer.

    write_model(tmp_path / "model", "qwen3-moe")
    python -m tests.support.vllm_models qwen3 DIRECTORY [--seed N]

Weights are wide enough that two seeds give other tokens. The same kind and seed give the same bits
on one machine. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB = 500
"""Not a multiple of 64: vLLM pads the embedding's rows."""

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_LARGE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "mixtral": ("Mixtral", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "474M": ("Qwen3", _LARGE),
}
"""Kind -> the name that transformers gives the shape, and what differs from the small one."""


def write_model(out: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a Hugging Face directory of that kind; returns ``out``."""
    import torch
    import transformers

    shape, differs = MODELS[kind]
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{shape}Config")(**{**_SMALL, **differs, **ends})
    config.dtype = torch.bfloat16
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = getattr(transformers, f"{shape}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # else all ones, and one could stand for another
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(out)
    _tokenizer().save_pretrained(out)
    return out


def _tokenizer() -> Any:
    """A byte-level BPE: any string, ids below VOCAB, 0 for padding and 1 for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((f"step {n} follows step {n - 1}" for n in range(200)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(write_model(asked.out, asked.kind, seed=asked.seed))


if __name__ == "__main__":
    _main()
