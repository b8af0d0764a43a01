"""Owns the bundled V4 vocabulary and how V4.1's follows from it.

Loading a vocabulary into a tokenizer is in `tokenizer`.
"""

import lzma
from importlib import resources
from typing import Final, Literal

type Version = Literal["v4", "v4.1"]

V41_SHA256: Final = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
"""SHA-256 of the released V4.1 tokenizer.json, which `vocabulary_text("v4.1")` equals byte for byte."""

_SYSTEM_ID: Final = 128799
_V41_SPELLINGS: Final = {
    _SYSTEM_ID: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    129264: ("<｜image2｜>", "<｜deepseek_image｜>"),
    129265: ("<｜/table>｜", "<|place_holder_mm_span_0436|>"),
    129266: ("<｜table｜>", "<|place_holder_mm_span_0437|>"),
    129267: ("<｜/td｜>", "<|place_holder_mm_span_0438|>"),
    129268: ("<｜td｜>", "<|place_holder_mm_span_0439|>"),
    129269: ("<｜/tr｜>", "<|place_holder_mm_span_0440|>"),
    129270: ("<｜tr｜>", "<|place_holder_mm_span_0441|>"),
    129279: ("<｜image｜>", "<|place_holder_mm_span_0442|>"),
}


def vocabulary_text(version: Version) -> str:
    """The tokenizer.json of V4 or V4.1, as released."""
    data = resources.files(__package__).joinpath("data", "deepseek-v4-tokenizer.json.xz").read_bytes()
    text = lzma.decompress(data).decode()
    return text if version == "v4" else derive_v41(text)


def derive_v41(v4_text: str) -> str:
    """The released V4.1 tokenizer.json from V4's: nine added tokens differ, and a final newline."""
    text = v4_text
    for token_id, (old, new) in _V41_SPELLINGS.items():
        start = text.index(f'"id": {token_id},')
        end = text.index("}", start)
        entry = text[start:end].replace(old, new)
        if token_id == _SYSTEM_ID:
            entry = entry.replace('"normalized": false', '"normalized": true')
            entry = entry.replace('"special": true', '"special": false')
        text = text[:start] + entry + text[end:]
    return text.rstrip("\n") + "\n"
