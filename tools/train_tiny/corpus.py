"""Turns prose and dialogues into what training reads: a tokenizer, rows of tokens, prompts, held-out questions.

A row holds whole documents one behind the other, each from its beginning-of-sequence token at an even place (so that
compressed groups of two are those of a document that stands alone), filled up with prose and padding.  Tokens are
uint16 with the bit `WRITTEN` on those that the model is to write.
"""

import hashlib
import json
import lzma
import random
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.model.tiny_tokenizer import CONTROL_TOKENS, MARKUP_TOKENS
from dialogues import Dialogue, boilerplate, draw_dialogue
from settings import BOS, PAD, VOCAB_SIZE
from texts import SOURCES, read_prose

Tokens = NDArray[np.uint16]

WRITTEN = 0x8000
STOP = 0xFFFF
"""Ends a prompt in the list of prompts."""

HELD_OUT = 20
"""One dialogue, and one piece of prose, of so many is never trained on."""
PIECE = 12
"""Paragraphs of prose that are held out together."""
SHORTEST = 16
"""Room below this is padded."""


@dataclass(frozen=True)
class Sizes:
    """How much is made: dialogues, rounds over the prose, tokens of a row, prompts for on-policy text, questions."""

    dialogues: int = 130_000
    rounds: int = 2
    tokens: int = 256
    prompts: int = 60_000
    questions: int = 900


def held_out(key: str) -> bool:
    """Whether a dialogue with this key is kept from training."""
    return zlib.crc32(key.encode()) % HELD_OUT == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE tokens: digits one by one, V4.1's special tokens, the prompt format's fixed lines.

    A fixed line is one token: a prompt with tools takes 60 tokens less for each.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    markup = [AddedToken(token, special=False, normalized=True) for token in (*MARKUP_TOKENS, *boilerplate())]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[*control, *markup],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finish(tokenizer)


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    """Let markup show in texts, and make fixed lines without markup tokens of the model itself.

    A prompt's own text is encoded by the model alone (what spells a control token in it is no control token), so that
    added tokens would not be found there; whole words of the vocabulary are, where the words are split so.
    """
    made = json.loads(tokenizer.to_str())
    lines = [line for line in boilerplate() if not any(mark in line for mark in MARKUP_TOKENS)]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    vocabulary = made["model"]["vocab"]
    for line in lines:
        vocabulary["".join(part for part, _ in spell(line))] = vocabulary.pop(line)
    made["model"]["ignore_merges"] = True
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] not in lines]
    for token in made["added_tokens"]:  # the trainer makes all of them special
        token["special"] = token["content"] in CONTROL_TOKENS
    either = "|".join(re.escape(line) for line in lines)
    words = rf"{either}|\p{{N}}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+"
    spaces = rf"\s+(?=\p{{N}}|{either})|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": f"{words}|{spaces}"}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole]}
    return Tokenizer.from_str(json.dumps(made))


def make_corpus(prose_folder: Path, out: Path, sizes: Sizes, seed: int = 0) -> dict[str, object]:
    """Write everything that training reads into `out`; returns what the model card says of it."""
    draw = random.Random(seed)
    paragraphs = read_prose(prose_folder)
    trained = [text for index, text in enumerate(paragraphs) if index // PIECE % HELD_OUT]
    kept = [text for index, text in enumerate(paragraphs) if not index // PIECE % HELD_OUT]
    dialogues = [each for each in _draw(sizes.dialogues, draw) if not any(held_out(key) for key in each.keys)]
    questions = [each for each in _draw(sizes.questions * HELD_OUT, draw) if held_out(each.keys[-1])]
    tokenizer = train_tokenizer([*trained, *(each.prompt + each.answer for each in dialogues[:40_000])])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    packer = _Packer(tokenizer, sizes.tokens, draw)
    files = {
        "rows": packer.pack(dialogues, trained, sizes.rounds),
        "held": packer.pack(questions, kept, 1)[: 8 * 128],
        "prompts": packer.prompts(dialogues, trained, sizes.prompts),
        "held_prompts": packer.prompts(questions, kept, 3000),
    }
    for name, array in files.items():
        (out / f"{name}.xz").write_bytes(lzma.compress(array.tobytes(), preset=6))
    lines = [json.dumps(asdict(each), ensure_ascii=False) for each in questions]
    (out / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (out / "prose.jsonl").write_text("\n".join(json.dumps(text) for text in kept[:400]) + "\n")
    card = _card(out, files, sizes, seed)
    (out / "data.json").write_text(json.dumps(card, indent=1))
    return card


def load_tokens(path: Path, width: int | None = None) -> Tokens:
    """Read one of the files of `make_corpus`: rows of `width` tokens, or a flat list."""
    flat = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)
    return flat if width is None else flat.reshape(-1, width)


def _draw(count: int, draw: random.Random) -> list[Dialogue]:
    return [draw_dialogue(draw) for _ in range(count)]


def _card(out: Path, files: dict[str, Tokens], sizes: Sizes, seed: int) -> dict[str, object]:
    names = [*(f"{name}.xz" for name in files), "tokenizer.json", "questions.jsonl", "prose.jsonl"]
    return {
        "seed": seed,
        "sizes": asdict(sizes),
        "sources": [asdict(source) for source in SOURCES],
        "tokens": {name: int(array.size) for name, array in files.items()},
        "written": int((files["rows"] & WRITTEN > 0).sum()),
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names},
    }


class _Packer:
    """Encodes texts and lays them into rows."""

    def __init__(self, tokenizer: Tokenizer, width: int, draw: random.Random) -> None:
        self._tokenizer, self._width, self._draw = tokenizer, width, draw

    def pack(self, dialogues: list[Dialogue], paragraphs: list[str], rounds: int) -> Tokens:
        """Rows with every dialogue that fits once and the prose `rounds` times."""
        documents = [document for document in self._dialogues(dialogues) if len(document) <= self._width]
        prose = self._prose(paragraphs)
        starts = [start for _ in range(rounds) for start in self._draw.sample(range(len(prose)), len(prose))]
        texts = _Texts(prose, starts)
        rows: list[Tokens] = []
        while documents or texts.left:
            if texts.left and self._draw.random() < texts.left / (texts.left + 2 * len(documents) / 3):
                rows.append(self._row([], texts))
            else:
                rows.append(self._row(documents, texts))
        order = self._draw.sample(range(len(rows)), len(rows))
        return np.stack([rows[index] for index in order])

    def _row(self, documents: list[Tokens], texts: "_Texts") -> Tokens:
        row = np.full(self._width, PAD, dtype=np.uint16)
        place = 0
        while documents and len(documents[-1]) <= self._width - place:
            document = documents.pop()
            row[place : place + len(document)] = document
            place += len(document) + len(document) % 2
        if self._width - place >= SHORTEST and texts.left:
            filling = texts.take(self._width - place)
            row[place : place + len(filling)] = filling
        return row

    def _dialogues(self, dialogues: list[Dialogue]) -> list[Tokens]:
        encode = self._tokenizer.encode_batch_fast
        prompts = encode([each.prompt for each in dialogues], add_special_tokens=False)
        answers = encode([each.answer for each in dialogues], add_special_tokens=False)
        return [_joined(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]

    def _prose(self, paragraphs: list[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch_fast([f"{text}\n\n" for text in paragraphs], add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint16) | np.uint16(WRITTEN) for each in encoded]

    def prompts(self, dialogues: list[Dialogue], paragraphs: list[str], count: int) -> Tokens:
        """A flat list of prompts, four of dialogues to one of prose, each ended by STOP."""
        chosen = self._draw.choices(dialogues, k=count * 4 // 5)
        encoded = self._tokenizer.encode_batch_fast([each.prompt for each in chosen], add_special_tokens=False)
        made = [[*each.ids, STOP] for each in encoded if len(each.ids) < self._width - 2 * SHORTEST]
        for text in self._draw.choices(self._prose(paragraphs), k=count // 5):
            head = (text & (WRITTEN - 1))[: self._draw.randint(3, 16)]
            made.append([BOS, *head.tolist(), STOP])
        self._draw.shuffle(made)
        return np.array([token for prompt in made for token in prompt], dtype=np.uint16)


class _Texts:
    """Hands out prose from the starts of paragraphs on."""

    def __init__(self, prose: list[Tokens], starts: list[int]) -> None:
        self._prose, self._starts = prose, starts
        self._tokens = sum(len(text) for text in prose) * len(starts) // max(1, len(prose))

    @property
    def left(self) -> int:
        """About how many rows of it are left."""
        return max(0, self._tokens) // 256 if self._starts else 0

    def take(self, room: int) -> Tokens:
        """A document of `room` tokens or less: the beginning, then the next paragraph and what follows it."""
        place = self._starts.pop()
        parts: list[Tokens] = [np.array([BOS], dtype=np.uint16)]
        while sum(map(len, parts)) < room and place < len(self._prose):
            parts.append(self._prose[place])
            place += 1
        taken = np.concatenate(parts)[:room]
        self._tokens -= len(taken)
        return taken


def _joined(prompt: list[int], answer: list[int]) -> Tokens:
    tokens = np.array([*prompt, *answer], dtype=np.uint16)
    tokens[len(prompt) :] |= np.uint16(WRITTEN)
    return tokens
