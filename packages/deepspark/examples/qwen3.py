"""Speculative decoding of a Hugging Face Qwen3-style target with a DeepSpec-style drafter.

    python examples/qwen3.py                                 a tiny random target: trains a drafter, compares texts
    python examples/qwen3.py --collect rounds.npz            collects calibration rounds, for `deepspark calibrate`
    python examples/qwen3.py --model DIR --draft DIR         a real pair (was not run here: no such weights at hand)

Needs `transformers` beside deepspark.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from deepspark.collect import collect_rounds, hash_weights
from deepspark.cost import CostTable
from deepspark.decode import GenerationSettings, SpeculativeDecoder, TargetRows
from deepspark.deepspec import DeepSpecBackbone, DeepSpecConfig, DeepSpecModel, TargetFacts, load_drafter
from deepspark.deepspec.training import LossSettings, choose_anchors, drafter_loss, training_rows
from deepspark.drafter import DrafterSettings, DSparkDrafter
from deepspark.policy import AlgorithmOne, Fixed
from deepspark.proposing import HeadedSource

MAX_CONTEXT = 512


class HuggingFaceTarget:
    """A causal language model with one cache a slot; taps are outputs of layers, as `hidden_states[l + 1]`."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[int]) -> None:
        self.model = model.eval()
        self._taps = taps
        self._caches: dict[int, DynamicCache] = {}

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    def begin(self, slot: int) -> None:
        """Forget the slot's text."""
        self._caches[slot] = DynamicCache()

    @torch.no_grad()
    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> TargetRows:
        """Run each sequence by itself: exactness is the point here, not speed."""
        logits, features = [], []
        for slot, fed, start in zip(slots, tokens, starts, strict=True):
            cache = self._caches[slot]
            surplus = cache.get_seq_length() - start
            if surplus > 0:
                cache.crop(-surplus)
            output = self.model(torch.tensor([fed]), cache=cache, use_cache=True, output_hidden_states=True)
            logits.append(output.logits[0])
            features.append(torch.cat([output.hidden_states[layer + 1][0] for layer in self._taps], -1))
        return TargetRows(torch.cat(logits), torch.cat(features))


def tiny_pair(seed: int = 0) -> tuple[PreTrainedModel, DeepSpecModel]:
    """Return a random target and a random drafter that share embedding and head."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    target = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, tie_word_embeddings=False, **shape)).double()
    # Random weights give nearly flat laws; sharper ones let drafts be wrong and right.
    target.lm_head.weight.data *= 20
    drafter = DeepSpecModel(
        DeepSpecConfig(
            num_hidden_layers=2, block_size=4, target_layer_ids=(0, 2), mask_token_id=63, markov_rank=8, **shape
        )
    ).double()
    drafter.embed_tokens.weight.data = target.model.embed_tokens.weight.data
    drafter.lm_head.weight.data = target.lm_head.weight.data
    return target, drafter.eval()


def train(target: PreTrainedModel, drafter: DeepSpecModel, steps: int) -> None:
    """Train the drafter on text that the target wrote itself, at the temperature it will serve."""
    taps = drafter.config.target_layer_ids
    model = HuggingFaceTarget(target, taps)
    writer = SpeculativeDecoder(model, None)
    texts = [[1 + seed % 60, 2, 3] for seed in range(16)]
    written = writer.generate(texts, [GenerationSettings(seed=1000 + i, max_new=48) for i in range(len(texts))])
    ids = [torch.tensor([*prompt, *result.tokens]) for prompt, result in zip(texts, written, strict=True)]
    rows = []
    for text in ids:
        model.begin(0)
        rows.append(model.forward([0], [text.tolist()], [0]))
    optimizer = torch.optim.AdamW([each for each in drafter.parameters() if each.requires_grad], lr=1e-2)
    for step in range(steps):
        text, seen = ids[step % len(ids)], rows[step % len(ids)]
        uniforms = torch.rand(len(text) - 1, dtype=torch.float64)
        anchors = choose_anchors(text, torch.ones(len(text)), uniforms, 24, drafter.config.block_size)
        assert seen.features is not None
        losses = drafter_loss(
            training_rows(drafter, text, seen.features, anchors), anchors, seen.logits, LossSettings()
        )
        optimizer.zero_grad()
        losses.loss.backward()
        optimizer.step()


def load_pair(target_folder: Path, draft_folder: Path) -> tuple[PreTrainedModel, DeepSpecModel]:
    """Load a real target and its drafter; refuses a drafter made for another target."""
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    config = target.config
    facts = TargetFacts(config.num_hidden_layers, config.hidden_size, config.vocab_size)
    shared = {
        "embed_tokens.weight": target.get_input_embeddings().weight.data,
        "lm_head.weight": target.get_output_embeddings().weight.data,
    }
    return target, load_drafter(draft_folder, facts, shared)


def make_decoder(
    target: PreTrainedModel, drafter: DeepSpecModel, num_slots: int, settings: DrafterSettings
) -> SpeculativeDecoder:
    """Join target and drafter."""
    backbone = DeepSpecBackbone(drafter, num_slots, MAX_CONTEXT)
    # Times of this loop were not measured: a table in which rows cost a tenth of a step.
    cost = CostTable([1, 1000], [1.0, 100.0], mode="linear")
    spark = DSparkDrafter(HeadedSource(backbone, drafter.heads), cost, num_slots, settings)
    taps = drafter.config.target_layer_ids
    return SpeculativeDecoder(HuggingFaceTarget(target, taps), spark, backbone)


def requests(count: int) -> Iterator[tuple[list[list[int]], list[GenerationSettings]]]:
    """Yield batches of random prompts without end."""
    from_seed = itertools.count()
    while True:
        seeds = list(itertools.islice(from_seed, count))
        prompts = [[1 + seed % 60, 2, 3] for seed in seeds]
        yield prompts, [GenerationSettings(seed=seed, max_new=64) for seed in seeds]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--collect", type=Path, metavar="FILE.npz")
    parser.add_argument("--rounds", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.model:
        target, drafter = load_pair(arguments.model, arguments.draft)
    else:
        target, drafter = tiny_pair()
        train(target, drafter, steps=150)
    prompts, settings = next(requests(8))
    if arguments.collect:
        whole = DrafterSettings(policy=Fixed(drafter.config.block_size), parking=None)
        decoder = make_decoder(target, drafter, 8, whole)
        count = collect_rounds(
            decoder, requests(8), arguments.collect, model_hash=hash_weights(drafter), rounds=arguments.rounds
        )
        sys.stdout.write(f"{count} rounds in {arguments.collect}\n")
        return
    taps = drafter.config.target_layer_ids
    for rule in ("greedy", "match"):
        plain = SpeculativeDecoder(HuggingFaceTarget(target, taps), None, rule=rule).generate(prompts, settings)
        decoder = make_decoder(target, drafter, 8, DrafterSettings(rule=rule, policy=AlgorithmOne(), parking=None))
        drafted = decoder.generate(prompts, settings)
        same = [a.tokens for a in plain] == [b.tokens for b in drafted]
        lengths = [length for each in drafted for length in each.accepted_lengths]
        tau = sum(lengths) / len(lengths)
        sys.stdout.write(f"rule {rule}: texts with and without drafts equal: {same}; tokens a step {tau:.2f}\n")


if __name__ == "__main__":
    main()
