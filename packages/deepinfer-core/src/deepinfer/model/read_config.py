"""Reads a config.json into a `ModelConfig`: every key checked, every default resolved, every refusal named.

What the fields mean is `config.py`'s.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import CheckpointError
from deepinfer.model.config import (
    DraftConfig,
    EngramConfig,
    EngramHashConfig,
    LayerConfig,
    ModelConfig,
    QuantConfig,
    RopeConfig,
    VisionConfig,
)

RATIOS = {"deepseek_v41": (0, 1, 2), "deepseek_v4": (0, 4, 128)}
"""Architectures that this engine runs, with the compression ratios of their layers."""

ONLY_KIND = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "dspark_target_attn_input": True,
}
"""Keys that change the computation, with the only value that is computed here."""

INTEGERS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_rank": "q_lora_rank",
    "o_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "window": "sliding_window",
    "max_positions": "max_position_embeddings",
    "intermediate": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
    "streams": "hc_mult",
    "sinkhorn_iters": "hc_sinkhorn_iters",
}
NUMBERS = {
    "eps": "rms_norm_eps",
    "routed_scale": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "hc_eps": "hc_eps",
}
"""Fields of `ModelConfig` that are a key of config.json as it stands."""


class _Keys:
    """A JSON object whose missing or wrong values become a `CheckpointError` that names file and key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, key: str, expected: str) -> CheckpointError:
        came = f"{self.values[key]!r}" if key in self.values else "nothing"
        return CheckpointError(f"{self.where}: {key} must be {expected}, found {came}; is this config.json complete?")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def integers(self, key: str, default: list[int] | None = None) -> tuple[int, ...]:
        value = self.values.get(key, default)
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self.fail(key, "a list of integers")
        return tuple(value)

    def section(self, key: str) -> "_Keys":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return _Keys(value, f"{self.where}: {key}")

    def must_be(self, key: str, allowed: object) -> None:
        """Refuse a value that changes the computation in a way this engine does not do."""
        if key in self.values and self.values[key] != allowed:
            raise self.fail(key, f"{allowed!r} (the only kind this engine computes)")


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises CheckpointError when the file is missing or not JSON, the architecture is unknown, a key is missing or a
    value cannot be right (also layer maps that point forward or outside the stack).
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json; expected the folder of a DeepSeek-V4.1 or V4 model") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}; download the file again")
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Turn the JSON object of a config.json into a `ModelConfig`; `where` names it in errors (see `read_config`)."""
    kind = values.get("model_type")
    if kind not in RATIOS:
        raise CheckpointError(
            f"{where}: unknown architecture: model_type {kind!r}, architectures {values.get('architectures')!r}; "
            f"this engine runs {' and '.join(RATIOS)}"
        )
    top = _Keys(values, where)
    v41 = kind == "deepseek_v41"
    text = top.section("text_config") if v41 else top
    for key, allowed in ONLY_KIND.items():
        text.must_be(key, allowed)
    engram = _engram(text) if v41 else None
    sizes: dict[str, Any] = {field: text.integer(key) for field, key in INTEGERS.items()}
    sizes |= {field: text.number(key) for field, key in NUMBERS.items()}
    config = ModelConfig(
        **sizes,
        family=kind,
        rope=_rope(text),
        layers=_layers_v41(text, engram) if v41 else _layers_v4(text),
        shared_experts=text.integer("n_shared_experts", 1),
        normalize_top_k=text.flag("norm_topk_prob", True),
        candidate_blocks=text.integer("candidate_topk_blocks", 1),
        candidate_block_size=text.integer("candidate_block_size", 1),
        hc_shifted=text.flag("hc_shifted", v41),
        q_head_norm=not v41,
        hadamard=not v41,
        fp4_entries=v41 and text.flag("use_fp4_sparse_kv", True),
        engram=engram,
        quant=_quant(top),
        draft=_draft(text) if v41 else None,
        draft_layers_declared=text.integer("num_nextn_predict_layers", 0, minimum=0),
        vision=_vision(top) if _has(top, "vision_config") else None,
        bos_token_id=top.integer("bos_token_id", 0, minimum=0),
        eos_token_ids=_eos(top),
        image_token_id=top.integer("image_token_id", minimum=0) if _has(top, "image_token_id") else None,
    )
    _check_sizes(config, text)
    return config


def _check_sizes(config: ModelConfig, text: _Keys) -> None:
    """Refuse sizes that contradict one another."""
    if config.heads % config.o_groups:
        raise text.fail("o_groups", f"a divisor of num_attention_heads ({config.heads})")
    if config.rope.dim % 2 or config.rope.dim > min(config.head_dim, config.index_dim):
        raise text.fail("qk_rope_head_dim", "even and at most head_dim and index_head_dim")
    if config.top_k > config.experts:
        raise text.fail("num_experts_per_tok", f"at most n_routed_experts ({config.experts})")
    if config.window > 128:
        raise text.fail("sliding_window", "at most 128 (one block of window KV)")
    if config.hc_shifted != (config.family == "deepseek_v41"):
        raise text.fail("hc_shifted", f"{config.family == 'deepseek_v41'} for this architecture")
    for key in ("bos_token_id", "image_token_id"):
        value = config.bos_token_id if key == "bos_token_id" else config.image_token_id
        if value is not None and value >= config.vocab_size:
            raise CheckpointError(f"{text.where}: {key} is {value}, but vocab_size is {config.vocab_size}")


def _rope(text: _Keys) -> RopeConfig:
    scaling = text.section("rope_scaling")
    if scaling.values.get("rope_type", scaling.values.get("type")) != "yarn":
        raise scaling.fail("rope_type", "'yarn'")
    return RopeConfig(
        dim=text.integer("qk_rope_head_dim"),
        theta=text.number("rope_theta"),
        compressed_theta=text.number("compress_rope_theta"),
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_positions=scaling.integer("original_max_position_embeddings"),
    )


def _layers_v41(text: _Keys, engram: EngramHashConfig | None) -> tuple[LayerConfig, ...]:
    count = text.integer("num_hidden_layers")
    ratios = _ratios(text, count, "deepseek_v41")
    kv_sources = _sources(text, "kv_source_layer_ids", count)
    index_sources = _index_sources(text, count, kv_sources)
    candidate = _candidate_source(text, index_sources)
    tables = text.integers("engram_num_embeddings") if engram else ()
    layers = []
    for index in range(count):
        ratio = ratios[index]
        kv_source = _source_of(text, "kv_source_layer_ids", index, ratio, ratios, kv_sources)
        index_source = _source_of(text, "index_source_layer_ids", index, ratio, ratios, index_sources)
        owns_index = index_source == index
        order = engram.layer_ids.index(index) if engram and index in engram.layer_ids else None
        layers.append(
            LayerConfig(
                index=index,
                ratio=ratio,
                kv_source=kv_source,
                index_source=index_source,
                owns_kv=kv_source == index,
                owns_index=owns_index,
                owns_index_keys=kv_source == index,
                candidates=_candidate_role(index, owns_index, candidate),
                decoder=index >= max(kv_sources),
                engram=EngramConfig(tables[order], order) if order is not None else None,
                hash_routing=False,
            )
        )
    return tuple(layers)


def _index_sources(text: _Keys, count: int, kv_sources: tuple[int, ...]) -> tuple[int, ...]:
    sources = _sources(text, "index_source_layer_ids", count)
    if not set(kv_sources) <= set(sources):
        raise text.fail("index_source_layer_ids", f"a list with every one of kv_source_layer_ids {list(kv_sources)}")
    if text.integers("index_k_source_layer_ids", list(kv_sources)) != kv_sources:
        raise text.fail("index_k_source_layer_ids", f"equal to kv_source_layer_ids {list(kv_sources)}")
    return sources


def _candidate_source(text: _Keys, index_sources: tuple[int, ...]) -> int | None:
    if not _has(text, "candidate_source_layer_id"):
        return None
    candidate = text.integer("candidate_source_layer_id", minimum=0)
    if candidate not in index_sources:
        raise text.fail("candidate_source_layer_id", f"one of index_source_layer_ids {list(index_sources)}")
    text.integer("candidate_topk_blocks")
    text.integer("candidate_block_size")
    return candidate


def _candidate_role(index: int, owns_index: bool, candidate: int | None) -> Literal["source", "reader"] | None:
    if candidate is None or not owns_index or index < candidate:
        return None
    return "source" if index == candidate else "reader"


def _layers_v4(text: _Keys) -> tuple[LayerConfig, ...]:
    count = text.integer("num_hidden_layers")
    ratios = _ratios(text, count, "deepseek_v4")
    hashed = text.integer("num_hash_layers", minimum=0)
    return tuple(
        LayerConfig(
            index=index,
            ratio=ratio,
            kv_source=index if ratio else None,
            index_source=index if ratio == 4 else None,
            owns_kv=ratio > 0,
            owns_index=ratio == 4,
            owns_index_keys=ratio == 4,
            candidates=None,
            decoder=False,
            engram=None,
            hash_routing=index < hashed,
        )
        for index, ratio in enumerate(ratios[:count])
    )


def _ratios(text: _Keys, count: int, family: str) -> tuple[int, ...]:
    ratios = text.integers("compress_ratios")
    if len(ratios) < count:
        raise text.fail("compress_ratios", f"at least num_hidden_layers ({count}) long")
    if not set(ratios) <= set(RATIOS[family]):
        raise text.fail("compress_ratios", f"made of {RATIOS[family]} for {family}")
    return ratios


def _sources(text: _Keys, key: str, count: int) -> tuple[int, ...]:
    sources = text.integers(key)
    if not sources or list(sources) != sorted(set(sources)) or sources[0] < 0 or sources[-1] >= count:
        raise text.fail(key, f"an ascending list of layers below num_hidden_layers ({count})")
    return sources


def _source_of(
    text: _Keys, key: str, index: int, ratio: int, ratios: tuple[int, ...], sources: tuple[int, ...]
) -> int | None:
    """The nearest source at or below a layer; a layer without one, or with one of another ratio, is a broken map."""
    if ratio == 0:
        if index in sources:
            raise text.fail(key, f"layers with a ratio above 0 (layer {index} has ratio 0)")
        return None
    source = max((s for s in sources if s <= index), default=None)
    if source is None:
        raise text.fail(
            key, f"such that layer {index} (ratio {ratio}) has a source at or before it: a source never lies ahead"
        )
    if ratios[source] != ratio:
        raise text.fail(
            key, f"such that layer {index} (ratio {ratio}) has a source of its ratio, not {source} ({ratios[source]})"
        )
    return source


def _engram(text: _Keys) -> EngramHashConfig | None:
    if not text.values.get("engram_layer_ids"):
        return None
    layer_ids = _sources(text, "engram_layer_ids", text.integer("num_hidden_layers"))
    if len(text.integers("engram_num_embeddings")) != len(layer_ids):
        raise text.fail("engram_num_embeddings", f"one table length for each of engram_layer_ids {list(layer_ids)}")
    return EngramHashConfig(
        layer_ids=layer_ids,
        max_ngram=text.integer("engram_max_ngram_size", minimum=2),
        heads=text.integer("engram_n_heads"),
        head_dim=text.integer("engram_head_dim"),
        vocab_size=text.integer("engram_vocab_size"),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size"),
        pad_token_id=text.integer("engram_pad_token_id", minimum=0),
    )


def _draft(text: _Keys) -> DraftConfig | None:
    stages = text.integer("num_nextn_predict_layers", 0, minimum=0)
    if stages == 0:
        return None
    targets = text.integers("dspark_target_layer_ids")
    count = text.integer("num_hidden_layers")
    if not targets or not all(0 <= layer < count for layer in targets):
        raise text.fail("dspark_target_layer_ids", f"layers below num_hidden_layers ({count})")
    if text.integer("dspark_noise_token_id", minimum=0) >= text.integer("vocab_size"):
        raise text.fail("dspark_noise_token_id", f"below vocab_size ({text.integer('vocab_size')})")
    return DraftConfig(
        stages=stages,
        block_size=text.integer("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id", minimum=0),
        target_layers=targets,
        markov_rank=text.integer("dspark_markov_rank"),
        experts=text.integer("dspark_n_routed_experts"),
        top_k=text.integer("dspark_num_experts_per_tok"),
    )


def _vision(top: _Keys) -> VisionConfig:
    vision = top.section("vision_config")
    return VisionConfig(
        layers=vision.integer("num_hidden_layers"),
        hidden=vision.integer("hidden_size"),
        intermediate=vision.integer("intermediate_size"),
        patch=vision.integer("patch_size"),
        downsample=vision.integer("downsample_ratio"),
    )


def _quant(top: _Keys) -> QuantConfig | None:
    if top.values.get("quantization_config") is None:
        return None
    quant = top.section("quantization_config")
    if quant.values.get("quant_method") != "fp8" or quant.values.get("scale_fmt", "ue8m0") != "ue8m0":
        raise quant.fail("quant_method", "'fp8' with scale_fmt 'ue8m0'")
    block = quant.integers("weight_block_size")
    if block not in ((32, 32), (128, 128)):
        raise quant.fail("weight_block_size", "[32, 32] or [128, 128]")
    experts = quant.values.get("expert_dtype", top.values.get("expert_dtype", "fp8"))
    if experts == "fp4":
        return QuantConfig(block=block[0], experts="fp4")
    if experts == "fp8":
        return QuantConfig(block=block[0], experts="fp8")
    raise quant.fail("expert_dtype", "'fp4' or 'fp8'")


def _eos(top: _Keys) -> tuple[int, ...]:
    value = top.values.get("eos_token_id", 1)
    return top.integers("eos_token_id") if isinstance(value, list) else (top.integer("eos_token_id", 1, minimum=0),)


def _has(text: _Keys, key: str) -> bool:
    return text.values.get(key) is not None
