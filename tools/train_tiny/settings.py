"""What the demo model is: its config.json, and the numbers of its training.

The configuration has every kind of layer of V4.1 at a size that a CPU runs; names and shapes of tensors follow from it
(`deepinfer.model.inventory`).
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deepinfer.model.config import EngramHashConfig
from deepinfer.model.engram_hash import compress_token_ids, primes
from deepinfer.model.tiny import COMMON, V41, quantisation

VOCAB_SIZE = 4096
BOS, EOS, PAD = 0, 1, 2

ENGRAM_LAYERS = (1, 2)
ENGRAM_VOCAB = 2000
NGRAM, ENGRAM_HEADS, ENGRAM_WIDTH = 4, 2, 32

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "index_topk": 512,
    "hc_sinkhorn_iters": 4,
    # window, window, full r2, reuse | full r1 (candidate source), reuse, reindex, reuse; then two draft stages
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
    "candidate_topk_blocks": 64,
    "engram_layer_ids": list(ENGRAM_LAYERS),
    "engram_max_ngram_size": NGRAM,
    "engram_vocab_size": ENGRAM_VOCAB,
    "engram_n_heads": ENGRAM_HEADS,
    "engram_head_dim": ENGRAM_WIDTH,
    "engram_pad_token_id": PAD,
    "num_nextn_predict_layers": 2,
    "dspark_noise_token_id": PAD,
    "dspark_markov_rank": 64,
}
"""What differs from the random tiny model's sizes."""

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "index_head_dim": 32,
    "dspark_markov_rank": 16,
}
"""What a rehearsal makes smaller still."""


def demo_config(tokenizer: Tokenizer, *, small: bool = False, quantised: bool = True) -> dict[str, Any]:
    """Return config.json of the demo model as a JSON object; `quantised=False` means plain weights throughout."""
    text = {**COMMON, **V41, **SIZES, **(SMALL if small else {})}
    ids = compress_token_ids(tokenizer, VOCAB_SIZE)
    hashing = EngramHashConfig(
        layer_ids=ENGRAM_LAYERS,
        max_ngram=NGRAM,
        heads=ENGRAM_HEADS,
        head_dim=ENGRAM_WIDTH,
        vocab_size=ENGRAM_VOCAB,
        compressed_vocab_size=int(ids.max()) + 1,
        pad_token_id=PAD,
    )
    text |= {
        "engram_compressed_vocab_size": hashing.compressed_vocab_size,
        "engram_num_embeddings": primes(hashing).sum((1, 2)).tolist(),
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if quantised:
        config |= quantisation(32)
    return {**config, "text_config": text}


@dataclass(frozen=True)
class Schedule:
    """Lengths and sizes of a training run; a row has `tokens` tokens.

    target_steps, draft_steps  most steps of a phase
    target_until_s, write_until_s, draft_until_s  seconds from the start of the run at which a phase ends at the latest
    rounded                    share of the target's end that trains with weights and activations in their formats
    """

    tokens: int = 256
    batch: int = 64
    target_steps: int = 20_000
    target_until_s: float = 230.0
    target_rate: float = 2e-3
    rounded: float = 0.2
    rollout_rows: int = 4096
    rollouts: int = 8
    write_until_s: float = 275.0
    draft_batch: int = 64
    anchors: int = 32
    draft_steps: int = 20_000
    draft_until_s: float = 400.0
    draft_rate: float = 2e-3
    warmup: int = 200
    clip: float = 1.0
    seed: int = 0


REHEARSAL = Schedule(
    tokens=128, batch=4, target_steps=12, rollout_rows=4, rollouts=1, draft_batch=2, anchors=4, draft_steps=8, warmup=2
)
"""A run of seconds on a CPU that passes every line."""
