"""Owns message content made of blocks: joining texts, placing image tokens, and checking image links and data URLs.

Fetching and decoding images is in `images`.
"""

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes

from deepseek_recipe.conversation import DataUrlImageSource, ImageDetail, ImageSource, UrlImageSource
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.request_rules import Conversion
from deepseek_recipe.special_tokens import SpecialToken

MAX_LINK_BYTES: Final = 8192
UNSUPPORTED_IMAGE: Final = "[Unsupported Image]"
_FORMATS: Final = "and has one of the following formats: webp, png, jpeg, and gif."
UNSUPPORTED_IMAGE_TEXT: Final = (
    f"You have uploaded an unsupported image. Please make sure your image is valid {_FORMATS}"
)
UNSUPPORTED_FILE_TEXT: Final = f"You have uploaded an unsupported file. Please make sure your file is valid {_FORMATS}"
FILE_ID_TEXT: Final = "file_id is not supported. Pass the image as a base64 data url instead."
_MEDIA_TYPES: Final = frozenset(("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"))
_DATA_URL: Final = re.compile(r"data:([^;,]*)((?:;[^;,]*)*?)(;base64)?,", re.IGNORECASE)
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/]*={0,2}")


@dataclass
class BlockText:
    """Joins the blocks of one message by blank lines and remembers where its images stand."""

    conversion: Conversion
    parts: list[str] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0

    def text(self, text: str) -> None:
        """Add a block of text, also an empty one."""
        self.length += len(text) + (2 if self.parts else 0)
        self.parts.append(text)

    def image(self, source: ImageSource | None) -> None:
        """Add an image; without a source (V4), a text that says that it is not supported."""
        if source is None:
            self.text(UNSUPPORTED_IMAGE)
            return
        spelling = self.conversion.options.special_tokens.token(SpecialToken.Image)
        self.text(spelling)
        self.spans.append((self.length - len(spelling), self.length))
        self.sources.append(source)

    def add(self, other: "BlockText") -> None:
        """Add another message's blocks as one block."""
        start = self.length + (2 if self.parts else 0)
        self.text(other.joined())
        self.spans += [(a + start, b + start) for a, b in other.spans]
        self.sources += other.sources

    def joined(self) -> str:
        """All blocks, joined by blank lines."""
        return "\n\n".join(self.parts)

    def fields(self) -> dict[str, object]:
        """Content and images as fields of a message."""
        return {"content": self.joined(), "image_sources": self.sources, "image_spans": tuple(self.spans)}


def is_link(url: str) -> bool:
    """Whether a URL is an http or https link."""
    return url[:7].lower() == "http://" or url[:8].lower() == "https://"


def too_long(url: str) -> str:
    """The error text for a link that is too long; empty if it is not."""
    length = len(url.encode())
    if length <= MAX_LINK_BYTES:
        return ""
    return (
        f"external link length {length} too long, max link length {MAX_LINK_BYTES}. Consider passing file data "
        "directly with base64 data url instead."
    )


def data_url_parts(url: str) -> tuple[str, bool, str] | None:
    """Media type in lower case, whether the data is base64, and the data; None if it is no data URL."""
    match = _DATA_URL.match(url)
    if not match:
        return None
    return match[1].strip().lower(), match[3] is not None, url[match.end() :]


def is_image_type(media_type: str) -> bool:
    """Whether the API takes images of this media type (in lower case)."""
    return media_type in _MEDIA_TYPES


def decode_data(data: str) -> bytes | None:
    """The bytes of a data URL's base64 data: padding optional, blanks and %XX allowed; None if it is not base64."""
    raw = unquote_to_bytes(data) if "%" in data else data.encode()
    raw = raw.translate(None, b" \t\r\n\f")
    if not _BASE64.fullmatch(raw):
        return None
    bare = raw.rstrip(b"=")
    if len(bare) % 4 == 1 or (len(bare) != len(raw) and len(raw) % 4):
        return None
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        return None


def url_image(url: str, detail: ImageDetail, path: str, *, link_error: str) -> ImageSource:
    """The image source for an `image_url`; `link_error` stands before the text for a link that is too long.

    Raises:
        ConversionError: for other schemes, other media types, bad base64 and links that are too long.
    """
    if is_link(url):
        problem = too_long(url)
        if problem:
            raise ConversionError(f"{link_error}{problem}")
        return UrlImageSource(url, detail, path=path)
    parts = data_url_parts(url)
    if parts is None or not parts[1]:
        raise ConversionError(f"{path}: Unsupported image_url format")
    media_type, _, data = parts
    if not is_image_type(media_type):
        raise ConversionError(f"{path}: {UNSUPPORTED_IMAGE_TEXT}")
    if decode_data(data) is None:
        raise ConversionError(f"{path}: Invalid base64 data")
    return DataUrlImageSource(url, detail, path=path)
