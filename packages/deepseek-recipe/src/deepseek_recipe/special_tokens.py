"""Owns the kinds of control token, their default spellings and a table of other spellings.

Which ids they have is the tokenizer's business.
"""

from enum import Enum
from typing import Final, override

IMAGE_SPECIAL_TOKEN_ID: Final = 129264
"""The id of V4.1's released image token, `<｜deepseek_image｜>`."""

RELEASED_V41_IMAGE_TOKEN: Final = "<｜deepseek_image｜>"
"""The spelling of the image token in the released V4.1 vocabulary; the API's default spelling is not in it."""


class SpecialToken(Enum):
    """A kind of control token; the value is its default spelling."""

    Bos = "<｜begin▁of▁sentence｜>"
    Eos = "<｜end▁of▁sentence｜>"
    ThinkingStart = "<think>"
    ThinkingEnd = "</think>"
    System = "<｜System｜>"
    User = "<｜User｜>"
    Assistant = "<｜Assistant｜>"
    LatestReminder = "<｜latest_reminder｜>"
    Dsml = "｜DSML｜"
    Image = "<｜image｜>"
    Ref = "<｜ref｜>"
    RefEnd = "<｜/ref｜>"
    Box = "<｜box｜>"
    BoxEnd = "<｜/box｜>"
    Point = "<｜point｜>"
    PointEnd = "<｜/point｜>"
    Polygon = "<｜polygon｜>"
    PolygonEnd = "<｜/polygon｜>"

    # Members are single; the hash of Enum is a Python call for every look-up of a spelling.
    __hash__ = object.__hash__

    def default_str(self) -> str:
        """The default spelling."""
        return self.value


GROUNDING_TOKENS: Final = (
    SpecialToken.Ref,
    SpecialToken.RefEnd,
    SpecialToken.Box,
    SpecialToken.BoxEnd,
    SpecialToken.Point,
    SpecialToken.PointEnd,
    SpecialToken.Polygon,
    SpecialToken.PolygonEnd,
)
"""The tokens that assistant text may contain, in the order in which they are tried."""


class SpecialTokens:
    """Spellings of the control tokens; what is not given keeps its default."""

    def __init__(  # noqa: PLR0913 - a public constructor, all by keyword
        self,
        *,
        bos: str | None = None,
        eos: str | None = None,
        thinking_start: str | None = None,
        thinking_end: str | None = None,
        system: str | None = None,
        user: str | None = None,
        assistant: str | None = None,
        latest_reminder: str | None = None,
        dsml: str | None = None,
        image: str | None = None,
        ref: str | None = None,
        ref_end: str | None = None,
        box: str | None = None,
        box_end: str | None = None,
        point: str | None = None,
        point_end: str | None = None,
        polygon: str | None = None,
        polygon_end: str | None = None,
    ) -> None:
        heads = (bos, eos, thinking_start, thinking_end, system, user, assistant, latest_reminder, dsml, image)
        grounding = (ref, ref_end, box, box_end, point, point_end, polygon, polygon_end)
        self._spellings = {
            kind: kind.default_str() if spelling is None else spelling
            for kind, spelling in zip(SpecialToken, (*heads, *grounding), strict=True)
        }

    def token(self, token: SpecialToken) -> str:
        """The spelling of `token`; empty if it was set to the empty string."""
        return self._spellings[token]

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecialTokens) and other._spellings == self._spellings

    @override
    def __hash__(self) -> int:
        return hash(tuple(self._spellings.values()))
