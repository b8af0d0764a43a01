"""Owns fetching images from links: where it may connect to, how much and how long. Needs httpx (extra `fetch`).

What becomes of the bytes is in `images`.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urljoin, urlsplit

from deepseek_recipe.errors import ImageError
from deepseek_recipe.json_writer import debug_string
from deepseek_recipe.request_images import MAX_LINK_BYTES, is_link

try:
    import httpx
except ImportError:  # the extra is not installed: an error tells so when a link has to be fetched
    httpx = None  # type: ignore[assignment]

MAX_IMAGE_BYTES: Final = 32 << 20
_TIMEOUT_S: Final = 10.0
_DEADLINE_S: Final = 60.0
_MAX_REDIRECTS: Final = 5
_CHUNK_BYTES: Final = 1 << 16

type DestinationFilter = Callable[[str, str], bool]


def too_large(place: str, limit: int) -> ImageError:
    """The error for a file of more than `limit` bytes."""
    return ImageError(f"{place}: image file size exceeds limit {limit >> 20} MB", "ImageTooLarge")


def check_link(url: str) -> None:
    """Check that a URL is an http or https link of a bearable length.

    Raises:
        ImageError: if not.
    """
    length = len(url.encode())
    if length > MAX_LINK_BYTES:
        raise ImageError(f"external link length {length} too long, max link length {MAX_LINK_BYTES}", "UrlTooLong")
    try:
        has_host = is_link(url) and bool(urlsplit(url).hostname)
    except ValueError:
        has_host = False
    if not has_host:
        raise ImageError(f"invalid url: {debug_string(url)}", "InvalidUrl")


def is_public(host: str, address: str) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local, multicast or reserved."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


class ReqwestImageFetcher:
    """Fetches images with httpx; the name is that of the interface it fills.

    Connects only to addresses that the destination filter allows, also after redirects; by default to public ones. Uses
    no proxy.
    """

    def __init__(self) -> None:
        self._max_bytes = MAX_IMAGE_BYTES
        self._allows: DestinationFilter = is_public

    @staticmethod
    def with_max_bytes(max_bytes: int) -> "ReqwestImageFetcher":
        """A fetcher that refuses files of more than `max_bytes`."""
        fetcher = ReqwestImageFetcher()
        fetcher._max_bytes = max_bytes
        return fetcher

    def with_destination_filter(self, destination_filter: DestinationFilter) -> "ReqwestImageFetcher":
        """A fetcher that asks `destination_filter(host, address)` for every address before connecting.

        A filter that raises or returns something else than a bool rejects.

        Raises:
            TypeError: if it is not callable.
        """
        if not callable(destination_filter):
            raise TypeError("destination_filter must be callable")
        fetcher = ReqwestImageFetcher.with_max_bytes(self._max_bytes)
        fetcher._allows = destination_filter
        return fetcher

    def fetch(self, url: str) -> bytes:
        """The bytes behind a link.

        Raises:
            ImageError: of kind InvalidUrl, UrlTooLong, DestinationRejected, ImageTooLarge or Fetch (worth another try).
            ImportError: without httpx.
        """
        check_link(url)
        return self.fetch_for(url, "image[0]")

    def fetch_for(self, url: str, place: str) -> bytes:
        """The bytes behind a link that has been checked; `place` begins the texts of errors."""
        if httpx is None:
            raise ImportError("fetching images needs httpx: pip install 'deepseek-recipe[fetch]'")
        deadline = time.monotonic() + _DEADLINE_S
        target = url
        failed = ImageError(f"{place}: Failed to download image from {url}", "Fetch", is_retryable=True)
        try:
            with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
                for _ in range(_MAX_REDIRECTS + 1):
                    data, location = self._get(client, target, place, deadline)
                    if location is None:
                        return data
                    target = urljoin(target, location)
                    check_link(target)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
            raise failed from None
        raise failed

    def _get(self, client: "httpx.Client", url: str, place: str, deadline: float) -> tuple[bytes, str | None]:
        """Ask once; return the body, or where a redirect leads."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        address = self._allowed_address(host, parts.port or (443 if parts.scheme.lower() == "https" else 80), place)
        literal = f"[{address}]" if ":" in address else address
        # Connecting to the checked address itself leaves no second look-up that could answer otherwise.
        direct = httpx.URL(url).copy_with(host=literal)
        request = client.build_request(
            "GET",
            direct,
            headers={"Host": parts.netloc.rpartition("@")[2], "User-Agent": "deepseek-recipe"},
            extensions={"sni_hostname": host},
        )
        response = client.send(request, stream=True)
        try:
            if response.is_redirect:
                return b"", response.headers["location"]
            response.raise_for_status()
            return self._read(response, place, deadline), None
        finally:
            response.close()

    def _read(self, response: "httpx.Response", place: str, deadline: float) -> bytes:
        data = bytearray()
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            data += chunk
            if len(data) > self._max_bytes:
                raise too_large(place, self._max_bytes)
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the whole download takes too long")
        return bytes(data)

    def _allowed_address(self, host: str, port: int, place: str) -> str:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for address in dict.fromkeys(found):
            if self._allowed(host, address.partition("%")[0]):
                return address
        raise ImageError(f"{place}: no address of {host} may be connected to", "DestinationRejected")

    def _allowed(self, host: str, address: str) -> bool:
        try:
            return self._allows(host, address) is True
        except Exception:  # noqa: BLE001 - a filter that fails, however, rejects
            return False
