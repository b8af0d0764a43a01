"""Makes a tiny checkpoint of random weights on the spot: every kind of layer, in the released names and formats.

It shows that an installation works, and it is what tests and benchmarks run; its text is pieces of words in no order.
The tokenizer is `tiny_tokenizer.py`'s, names and shapes are `inventory.py`'s.
"""

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.errors import ConfigError
from deepinfer.model.config import EngramHashConfig
from deepinfer.model.engram_hash import compress_token_ids, primes
from deepinfer.model.inventory import TensorSpec, inventory
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny_tokenizer import IMAGE_TOKEN, SYSTEM_TOKEN, VOCAB_SIZE, make_tokenizer

Family = Literal["deepseek_v41", "deepseek_v4"]

LOGIT_SPREAD = 3.0
"""Standard deviation of the logits of tokens that begin a word; the others' are MUTED times that and hardly occur."""
MUTED = 0.05

FP4_SPREAD = 2.93
"""Root mean square of the sixteen E2M1 values."""
FP8_SPREAD = 64.0
"""Standard deviation of E4M3 codes before their scale: well inside the range of 448, well above the subnormals."""
SCALE_BIAS = 127

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 32,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
"""What both families share."""

V41: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "rms_norm_eps": 1e-20,
    "num_hidden_layers": 8,
    # window, window, full r2, reuse | full r1 (candidate source), reuse, reindex, reuse; then three draft stages
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 2],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 200,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

V4: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 6,
    # window, window, then ratios 4 and 128 in turn; the last number belongs to the draft block that is not there
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
}


def quantisation(block: int) -> dict[str, Any]:
    """What config.json says of FP8 weights in square blocks and of FP4 experts."""
    formats: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [block, block],
        "expert_dtype": "fp4",
    }
    return {"quantization_config": formats, "expert_dtype": "fp4"}


def tiny_config(family: Family = "deepseek_v41", *, quantised: bool = True) -> dict[str, Any]:
    """Return the config.json of a tiny model as a JSON object; `quantised=False` means BF16 weights throughout."""
    tokenizer = make_tokenizer()
    block = 32 if family == "deepseek_v41" else 128
    config: dict[str, Any] = {
        "model_type": family,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if quantised:
        config |= quantisation(block)
    if family == "deepseek_v4":
        return {"architectures": ["DeepseekV4ForCausalLM"], **config, **COMMON, **V4}
    text = {**COMMON, **V41, "dspark_noise_token_id": tokenizer.token_to_id(SYSTEM_TOKEN), **_engram_sizes(tokenizer)}
    config |= {"image_token_id": tokenizer.token_to_id(IMAGE_TOKEN), "text_config": text}
    return {"architectures": ["DeepseekV41ForCausalLM"], **config}


def write_tiny(folder: Path, *, seed: int = 0, family: Family = "deepseek_v41", quantised: bool = True) -> None:
    """Write a tiny checkpoint: config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    The folder appears complete or not at all.  Raises ConfigError when it exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists already and is not empty; expected a new folder: choose another name")
    values = tiny_config(family, quantised=quantised)
    tokenizer = make_tokenizer()
    tensors = _make_tensors(inventory(parse_config(values)), seed)
    _mute_all_but_words(tensors["head.weight"], tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "model.safetensors").chmod(0o644)  # the library makes it private
        tokenizer.save(str(draft / "tokenizer.json"))
        (draft / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(tokenizer), indent=1))
        (draft / "config.json").write_text(json.dumps(values, indent=1))
        draft.chmod(0o755)  # mkdtemp makes it private
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _engram_sizes(tokenizer: Tokenizer) -> dict[str, Any]:
    compressed = int(compress_token_ids(tokenizer, VOCAB_SIZE).max()) + 1
    config = EngramHashConfig(
        layer_ids=tuple(V41["engram_layer_ids"]),
        max_ngram=V41["engram_max_ngram_size"],
        heads=V41["engram_n_heads"],
        head_dim=V41["engram_head_dim"],
        vocab_size=V41["engram_vocab_size"],
        compressed_vocab_size=compressed,
        pad_token_id=V41["engram_pad_token_id"],
    )
    rows = primes(config).sum((1, 2)).tolist()
    return {"engram_compressed_vocab_size": compressed, "engram_num_embeddings": rows}


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers and other tools read beside tokenizer.json."""
    tokens = {f"{name}_token": tokenizer.id_to_token(index) for index, name in enumerate(("bos", "eos", "pad"))}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": COMMON["max_position_embeddings"],
        **tokens,
    }


def _mute_all_but_words(head: Tensor, tokenizer: Tokenizer) -> None:
    """Shrink the head's rows of control tokens, bytes and pieces inside words, so that text reads like words."""
    texts = tokenizer.decode_batch([[token] for token in range(VOCAB_SIZE)], skip_special_tokens=False)
    words = [text.startswith(" ") and text[1:].isalpha() for text in texts]
    head[~torch.tensor(words)] *= MUTED


def _make_tensors(specs: dict[str, TensorSpec], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _make(name, spec, specs, generator) for name, spec in specs.items() if not spec.optional}


def _make(name: str, spec: TensorSpec, specs: dict[str, TensorSpec], generator: torch.Generator) -> Tensor:
    """Draw one tensor so that activations keep a size near 1 through the stack."""
    shape, dtype = spec.shape, spec.dtypes[0]
    last = name.rsplit(".", 1)[-1]

    def normal(spread: float) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    if dtype == "F8_E4M3":
        return normal(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
    if dtype == "I8":
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if dtype == "F8_E8M0":
        return _scales(name, shape, specs, generator)
    if dtype == "I64":
        experts = specs[f"{name.removesuffix('tid2eid')}weight"].shape[0]
        return torch.rand(shape[0], experts, generator=generator).topk(shape[1]).indices
    if dtype == "F32":
        if last == "hc_head_scale" or last.endswith("_scale"):
            return 0.7 + normal(0.1)
        spreads = {"attn_sink": 1.5, "ape": 0.5, "bias": 0.05, "bias_vl": 0.05}
        return normal(spreads.get(last, 0.7 if last.endswith("_base") else shape[-1] ** -0.5))
    if "norm" in name or last in ("q_weight", "k_weight"):
        return (1 + normal(0.1)).bfloat16()
    if name == "head.weight":
        return normal(LOGIT_SPREAD * shape[-1] ** -0.5).bfloat16()
    return normal(1.0 if "embed" in name else shape[-1] ** -0.5).bfloat16()


def _scales(name: str, shape: tuple[int, ...], specs: dict[str, TensorSpec], generator: torch.Generator) -> Tensor:
    """Scales that bring codes to 1 / sqrt(columns) (Engram rows: to 1), each off by up to a factor of 2."""
    weight = specs[f"{name.removesuffix('.scale')}.weight"]
    fp4 = weight.dtypes[0] == "I8"
    columns = weight.shape[1] * (2 if fp4 else 1)
    wanted = 1.0 if ".embed." in name else columns**-0.5
    exponent = round(math.log2(wanted / (FP4_SPREAD if fp4 else FP8_SPREAD)))
    noise = torch.randint(-1, 1, shape, generator=generator)
    bytes_ = (noise + (exponent + SCALE_BIAS)).numpy().astype(np.uint8)
    return torch.from_numpy(bytes_).view(torch.float8_e8m0fnu)
