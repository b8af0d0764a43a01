"""Owns how large an image becomes for the model and how many tokens it takes.

Resizing itself is in `images`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from deepseek_recipe.errors import CalcResizeError

_SMALLEST_AREA: Final = 295_936
_PATCH: Final = 14
_GROUP: Final = 3
_CELL: Final = _PATCH * _GROUP
_MAX_TOKENS: Final = 1024
_MAX_PASSES: Final = 64


def _cells(width: int, height: int) -> tuple[int, int]:
    """How many cells of 3 x 3 patches a size needs, by columns and rows."""
    return math.ceil(width / _PATCH / _GROUP), math.ceil(height / _PATCH / _GROUP)


def _tokens(columns: int, rows: int) -> int:
    return rows * (columns + 1) + 2


def _plan(width: int, height: int) -> tuple[int, int]:
    """One step towards a size in whole patches that is neither too small nor too large."""
    if 0 < width * height < _SMALLEST_AREA:
        scale = math.sqrt(_SMALLEST_AREA / (width * height))
        width, height = math.trunc(width * scale), math.trunc(height * scale)
    planned = math.ceil(width / _PATCH) * _PATCH, math.ceil(height / _PATCH) * _PATCH
    if _tokens(*_cells(*planned)) <= _MAX_TOKENS:
        return planned
    ratio = height / width if width else math.inf
    columns = math.sqrt((_MAX_TOKENS - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return _CELL, (_MAX_TOKENS - 2) // 2 * _CELL
    if rows < 1:
        return (_MAX_TOKENS - 3) * _CELL, _CELL
    scale = min(math.floor(columns) * _CELL / width, math.floor(rows) * _CELL / height)
    return math.floor(width * scale / _PATCH) * _PATCH, math.floor(height * scale / _PATCH) * _PATCH


def model_size(width: int, height: int, longest: int | None = None) -> tuple[int, int]:
    """The size to which an image is resized for the model, in pixels; no side longer than `longest`.

    Raises:
        CalcResizeError: if none is found.
    """
    size = width, height
    for _ in range(_MAX_PASSES):
        planned = _plan(*size)
        if longest is not None:
            limit = longest // _PATCH * _PATCH
            planned = min(planned[0], limit), min(planned[1], limit)
        if planned == size:
            return size
        size = planned
    raise CalcResizeError(f"no grid of patches was found for an image of {width} x {height} pixels")


def image_tokens(width: int, height: int) -> int:
    """How many tokens an image of this size takes.

    Raises:
        CalcResizeError: if no size in whole patches is found.
    """
    return _tokens(*_cells(*model_size(width, height)))


def _side(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a side must be int, not {type(value).__name__}")
    if not 0 <= value < 1 << 32:
        raise OverflowError(f"a side must be in [0, 2^32), not {value}")
    return value


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An image ready for the model: its file and its size in pixels."""

    data: bytes
    width: int
    height: int

    def __post_init__(self) -> None:
        _side(self.width)
        _side(self.height)


@dataclass(frozen=True, slots=True)
class MultiModalData:
    """The images of a prompt, in order."""

    images: list[ImageInfo] = field(default_factory=list)

    def __init__(self, images: Sequence[ImageInfo] | None = None) -> None:
        object.__setattr__(self, "images", list(images or ()))

    def is_empty(self) -> bool:
        """Whether there are no images."""
        return not self.images

    def image_token_adjustment(self) -> int:
        """How many tokens longer the prompt is than its text, which has one token for each image.

        Raises:
            CalcResizeError: if no size in whole patches is found for an image.
        """
        return sum(image_tokens(image.width, image.height) - 1 for image in self.images)
