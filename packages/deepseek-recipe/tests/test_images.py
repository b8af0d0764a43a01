"""Fetching images: where it may connect to, what it refuses, and what a resolver makes of it."""

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

import deepseek_recipe as recipe
from deepseek_recipe.image_fetch import is_public


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        data = png(40, 30) if self.path == "/image" else b"x" * 100_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def local(host: str, address: str) -> bool:
    return address == "127.0.0.1"


def fetcher() -> recipe.ReqwestImageFetcher:
    return recipe.ReqwestImageFetcher().with_destination_filter(local)


def kind_of(use: object, *arguments: object) -> str:
    with pytest.raises(recipe.ImageError) as raised:
        use(*arguments)  # type: ignore[operator]
    return raised.value.kind


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "100.64.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
    ],
)
def test_private_addresses_are_refused(address: str) -> None:
    assert not is_public("host", address)


def test_public_addresses_are_allowed() -> None:
    assert is_public("host", "93.184.216.34")
    assert is_public("host", "2606:2800:220:1:248:1893:25c8:1946")


def test_nothing_private_is_reached_by_default(server: str) -> None:
    assert kind_of(recipe.ReqwestImageFetcher().fetch, f"{server}/image") == "DestinationRejected"
    assert (
        kind_of(recipe.ReqwestImageFetcher().fetch, server.replace("127.0.0.1", "localhost")) == "DestinationRejected"
    )


def test_an_image_is_fetched_also_behind_redirects(server: str) -> None:
    assert fetcher().fetch(f"{server}/image") == png(40, 30)
    assert fetcher().fetch(f"{server}/to//image") == png(40, 30)
    assert fetcher().fetch(f"{server}/to/{server}/image") == png(40, 30)


def test_a_redirect_is_checked_as_well(server: str) -> None:
    asked: list[tuple[str, str]] = []

    def only_by_number(host: str, address: str) -> bool:
        asked.append((host, address))
        return host == "127.0.0.1"

    guarded = recipe.ReqwestImageFetcher().with_destination_filter(only_by_number)
    elsewhere = server.replace("127.0.0.1", "localhost")
    assert kind_of(guarded.fetch, f"{server}/to/{elsewhere}/image") == "DestinationRejected"
    assert asked[0] == ("127.0.0.1", "127.0.0.1")
    assert asked[1][0] == "localhost"


def test_a_filter_that_fails_or_answers_oddly_rejects(server: str) -> None:
    def fails(host: str, address: str) -> bool:
        raise OSError

    def odd(host: str, address: str) -> bool:
        return 1  # type: ignore[return-value]

    for bad in (fails, odd):
        guarded = recipe.ReqwestImageFetcher().with_destination_filter(bad)
        assert kind_of(guarded.fetch, f"{server}/image") == "DestinationRejected"
    with pytest.raises(TypeError, match="must be callable"):
        recipe.ReqwestImageFetcher().with_destination_filter("no")  # type: ignore[arg-type]


def test_limits_and_failures(server: str) -> None:
    small = recipe.ReqwestImageFetcher.with_max_bytes(1_000).with_destination_filter(local)
    assert kind_of(small.fetch, f"{server}/large") == "ImageTooLarge"
    assert kind_of(fetcher().fetch, f"{server}/missing") == "Fetch"
    assert kind_of(fetcher().fetch, f"{server}/to/{server}/to/{server}/missing") == "Fetch"
    assert kind_of(fetcher().fetch, "ftp://x/y") == "InvalidUrl"
    assert kind_of(fetcher().fetch, "http://") == "InvalidUrl"
    assert kind_of(fetcher().fetch, "http://x/" + "a" * 9000) == "UrlTooLong"
    with pytest.raises(recipe.ImageError) as raised:
        fetcher().fetch(f"{server}/missing")
    assert raised.value.is_retryable
    assert str(raised.value) == f"image[0]: Failed to download image from {server}/missing"


def test_a_resolver_fetches_decodes_and_counts(server: str) -> None:
    resolver = recipe.ImageResolver(fetcher(), recipe.OpenCvImagePreprocessor())
    data_url = "data:image/png;base64," + base64.b64encode(png(20, 21)).decode()
    quota = recipe.ImageQuota()
    sources = [recipe.UrlImageSource(f"{server}/image"), recipe.DataUrlImageSource(data_url, "low")]
    data = resolver.resolve(sources, quota)
    assert [(image.width, image.height) for image in data.images] == [(630, 476), (532, 560)]
    assert (quota.image_count(), quota.byte_size()) == (2, len(png(40, 30)) + len(png(20, 21)))
    assert Image.open(io.BytesIO(data.images[0].data)).format == "WEBP"
    assert data.image_token_adjustment() > 300


def test_too_large_files_and_totals_are_refused() -> None:
    resolver = recipe.ImageResolver(fetcher(), recipe.OpenCvImagePreprocessor())
    big = recipe.BytesImageSource(b"\0" * ((32 << 20) + 1), path="p")
    with pytest.raises(recipe.ImageError, match=r"^p\.image\[0\]: image file size exceeds limit 32 MB$"):
        resolver.resolve([big], recipe.ImageQuota())
    image = png(30, 30)
    padded = recipe.BytesImageSource(image + b"\0" * ((30 << 20) - len(image)))
    quota = recipe.ImageQuota()
    with pytest.raises(recipe.ImageError, match="max 64 MB per request"):
        resolver.resolve([padded] * 3, quota)
    assert quota.image_count() == 0


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    options = recipe.PreprocessOptions("high", 100, 512)
    assert kind_of(recipe.OpenCvImagePreprocessor().preprocess, png(101, 1), options) == "ImageDimensionsTooLarge"
