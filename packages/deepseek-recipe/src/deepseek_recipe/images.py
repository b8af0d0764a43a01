"""Owns decoding and resizing images, and the limits on the images of a request. Needs Pillow (extra `images`).

Sizes are worked out in `image_sizes`, links are fetched in `image_fetch`.
"""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepseek_recipe.conversation import ImageDetail, ImageSource
from deepseek_recipe.errors import ImageError
from deepseek_recipe.image_fetch import MAX_IMAGE_BYTES, ReqwestImageFetcher, check_link, too_large
from deepseek_recipe.image_sizes import ImageInfo, MultiModalData, model_size
from deepseek_recipe.request_images import (
    UNSUPPORTED_IMAGE_TEXT,
    data_url_parts,
    decode_data,
    is_image_type,
)

try:
    from PIL import Image, ImageOps
except ImportError:  # the extra is not installed: an error tells so when an image has to be decoded
    Image = None  # type: ignore[assignment]

MAX_IMAGES: Final = 600
_MAX_TOTAL_BYTES: Final = 64 << 20
_MAX_SIDE: Final = 8192
_LOW_DETAIL_SIDE: Final = 512
_LONGEST_WEBP_SIDE: Final = 16_383
_WEBP_QUALITY: Final = 95
_WEBP_EFFORT: Final = 1
_FORMATS: Final = ("WEBP", "PNG", "JPEG", "GIF")
_SIGNATURES: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


class ImageQuota:
    """What the images of one request have used up, over any number of calls."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0

    def image_count(self) -> int:
        """How many images there were."""
        return self._count

    def byte_size(self) -> int:
        """How large their files were together, in bytes."""
        return self._bytes

    def record(self, count: int, byte_size: int) -> None:
        """Add images."""
        self._count += count
        self._bytes += byte_size


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """How an image is prepared; sides in pixels."""

    detail: ImageDetail
    max_dimension_px: int
    low_detail_max_dimension_px: int


def _unsupported(kind: str, place: str) -> ImageError:
    return ImageError(f"{place}: {UNSUPPORTED_IMAGE_TEXT}", kind)


def _has_signature(data: bytes) -> bool:
    return data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


class OpenCvImagePreprocessor:
    """Decodes and resizes images with Pillow; the name is that of the interface it fills."""

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
        """Resize an image (webp, png, jpeg or gif) to the size the model wants; the result is a webp file, RGB.

        Raises:
            ImageError: if it is empty, of another format, damaged or too large. ImportError: without Pillow.
        """
        return _preprocess(data, options, "image[0]")


def _preprocess(data: bytes, options: PreprocessOptions, place: str) -> ImageInfo:
    if not data:
        raise _unsupported("EmptyImage", place)
    if not _has_signature(data):
        raise _unsupported("UnsupportedMediaType", place)
    if Image is None:
        raise ImportError("images need Pillow: pip install 'deepseek-recipe[images]'")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if max(image.size) > options.max_dimension_px:
                raise _unsupported("ImageDimensionsTooLarge", place)
            rgb = ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError:
        raise _unsupported("ImageDimensionsTooLarge", place) from None
    except (OSError, SyntaxError, ValueError, EOFError):
        raise _unsupported("EmptyImage", place) from None
    if options.detail == "low":
        rgb = _shrink(rgb, options.low_detail_max_dimension_px)
    size = model_size(*rgb.size, longest=_LONGEST_WEBP_SIDE)
    resized = rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)
    return ImageInfo(_webp(resized), *size)


def _webp(image: "Image.Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_WEBP_QUALITY, method=_WEBP_EFFORT)
    return file.getvalue()


def _shrink(image: "Image.Image", longest: int) -> "Image.Image":
    """Shrink an image so that its longer side is at most `longest`."""
    side = max(image.size)
    if side <= longest:
        return image
    width, height = (max(1, int(edge * longest / side + 0.5)) for edge in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


class ImageResolver:
    """Turns the image sources of a prompt into images for the model, within the limits of a request."""

    def __init__(self, fetcher: ReqwestImageFetcher, preprocessor: OpenCvImagePreprocessor) -> None:
        self._fetcher = fetcher
        self._preprocessor = preprocessor

    def resolve(self, sources: Sequence[ImageSource], quota: ImageQuota) -> MultiModalData:
        """Fetch, decode and resize all images; record them in `quota` if all went well.

        Raises:
            ImageError: for the first image that fails and for too many or too large ones; the quota is left as it was.
        """
        total = quota.image_count() + len(sources)
        if total > MAX_IMAGES:
            raise ImageError(f"Too many images: max {MAX_IMAGES} images per request, got {total}", "TooManyImages")
        at_path: Counter[str] = Counter()
        images: list[ImageInfo] = []
        ready: dict[tuple[bytes, ImageDetail], ImageInfo] = {}
        size = 0
        for source in sources:
            place = f"{source.path}." if source.path else ""
            place += f"image[{at_path[source.path]}]"
            at_path[source.path] += 1
            data = self._load(source, place)
            size += len(data)
            if quota.byte_size() + size > _MAX_TOTAL_BYTES:
                raise ImageError(
                    "Total image size exceeds the limit: max 64 MB per request, got "
                    f"{(quota.byte_size() + size) >> 20} MB",
                    "TotalSizeTooLarge",
                )
            same = data, source.detail
            if same not in ready:
                options = PreprocessOptions(source.detail, _MAX_SIDE, _LOW_DETAIL_SIDE)
                ready[same] = _preprocess(data, options, place)
            images.append(ready[same])
        quota.record(len(images), size)
        return MultiModalData(images)

    def _load(self, source: ImageSource, place: str) -> bytes:
        if source.url is not None:
            check_link(source.url)
            data = self._fetcher.fetch_for(source.url, place)
        elif source.data_url is not None:
            data = _data_of(source.data_url, place)
        else:
            data = source.data or b""
        if len(data) > MAX_IMAGE_BYTES:
            raise too_large(place, MAX_IMAGE_BYTES)
        return data


def _data_of(data_url: str, place: str) -> bytes:
    """The bytes in a data URL."""
    parts = data_url_parts(data_url)
    if parts is None:
        raise _unsupported("InvalidDataUrl", place)
    media_type, is_base64, text = parts
    if not is_image_type(media_type):
        raise _unsupported("UnsupportedMediaType", place)
    if not is_base64:
        raise _unsupported("Decode", place)
    data = decode_data(text)
    if data is None:
        raise _unsupported("InvalidDataUrl", place)
    return data
