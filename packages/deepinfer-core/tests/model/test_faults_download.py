"""Fetching a model from a Hub: only tensors and JSON, resumed where it broke off, every failure with its message."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import CheckpointError
from deepinfer.model import download
from deepinfer.model.checkpoint import open_checkpoint
from deepinfer.model.download import CONFIG_ONLY, Hub, fetch
from deepinfer.model.tiny import write_tiny

from .hub_server import HubServer, hub_server

SECTION = "Downloads"
MODEL = "owner/tiny-model"
WEIGHTS = "model.safetensors"
REAL_FILES = {"config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}

FAULTS = (
    "a name that is neither folder nor model",
    "a model that the Hub does not know",
    "a revision that the Hub does not know",
    "a gated model",
    "no network",
    "offline, and not downloaded before",
    "offline, and the download is incomplete",
    "an interrupted download",
    "no disk space, seen before the start",
    "no disk space, seen on the way",
)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    write_tiny(folder)
    strange = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04", "README.md": b"# tiny"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | strange


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[HubServer]:
    with hub_server(MODEL, dict(files)) as running:
        yield running


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(cache_dir=tmp_path / "cache", endpoint=server.url, token="hf_test", quiet=True)


def offline(hub: Hub) -> Hub:
    return Hub(cache_dir=hub.cache_dir, endpoint=hub.endpoint, offline=True, quiet=True)


def shown(error: pytest.ExceptionInfo[CheckpointError], hub: Hub) -> str:
    """The message as the page shows it: without the cache's path, and without the words of the network library."""
    text = str(error.value).replace(str(hub.cache_dir), "CACHE")
    text = re.sub(r"interrupted \(.*\);", "interrupted (...);", text, flags=re.DOTALL)
    return re.sub(r"free are [\d,]+", "free are (...)", text)


def test_only_tensors_and_json_are_fetched(hub: Hub) -> None:
    folder = fetch(MODEL, hub)
    assert {path.name for path in folder.iterdir()} == REAL_FILES
    assert open_checkpoint(MODEL, hub=hub).compressed_ids is not None
    assert fetch(MODEL, offline(hub)) == folder


def test_a_plan_needs_the_configuration_only(hub: Hub, server: HubServer) -> None:
    folder = fetch(MODEL, hub, CONFIG_ONLY)
    assert {path.name for path in folder.iterdir()} == {"config.json"}
    assert [name for name, _ in server.ranges] == ["config.json"]


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    assert fetch(tmp_path, Hub()) == tmp_path
    assert fetch(str(tmp_path), Hub()) == tmp_path


def test_a_broken_connection_is_resumed_in_the_middle(hub: Hub, server: HubServer) -> None:
    large = "large.safetensors"
    server.files[large] = bytes(range(256)) * (24 << 12)  # the library keeps what has come in pieces of 10 MB
    server.cut = large
    folder = fetch(MODEL, hub, (large,))
    assert [asked for _, asked in server.ranges] == [None, f"bytes={10 << 20}-"]
    assert (folder / large).read_bytes() == server.files[large]


def test_a_download_that_ended_is_continued_by_the_next(hub: Hub, server: HubServer, errors_page: Any) -> None:
    fetch(MODEL, hub, CONFIG_ONLY)
    server.cut, server.dies = WEIGHTS, True
    with pytest.raises(CheckpointError, match="run the same command again") as caught:
        fetch(MODEL, hub)
    errors_page.check(SECTION, "an interrupted download", shown(caught, hub))
    with pytest.raises(CheckpointError, match=r"its download in .* is incomplete") as caught:
        fetch(MODEL, offline(hub))
    errors_page.check(SECTION, "offline, and the download is incomplete", shown(caught, hub))
    server.down = False
    server.ranges.clear()
    folder = fetch(MODEL, hub)
    assert {path.name for path in folder.iterdir()} == REAL_FILES
    assert WEIGHTS in dict(server.ranges)
    assert "config.json" not in dict(server.ranges)


@pytest.mark.parametrize(
    ("fault", "answer", "words"),
    [
        ("a model that the Hub does not know", (404, "RepoNotFound"), "knows no such model"),
        ("a gated model", (403, "GatedRepo"), "accept its terms"),
    ],
)
def test_refusal_has_its_message(
    fault: str, answer: tuple[int, str], words: str, hub: Hub, server: HubServer, errors_page: Any
) -> None:
    server.refuses = answer
    with pytest.raises(CheckpointError, match=words) as caught:
        fetch(MODEL, hub)
    errors_page.check(SECTION, fault, shown(caught, hub))


def test_unknown_revision(hub: Hub, server: HubServer, errors_page: Any) -> None:
    other = Hub(cache_dir=hub.cache_dir, endpoint=server.url, revision="v9", quiet=True)
    with pytest.raises(CheckpointError, match="no revision 'v9'") as caught:
        fetch(MODEL, other)
    errors_page.check(SECTION, "a revision that the Hub does not know", shown(caught, hub))


def test_no_network(tmp_path: Path, errors_page: Any) -> None:
    hub = Hub(cache_dir=tmp_path / "cache", endpoint="http://127.0.0.1:9", quiet=True)  # nobody listens there
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        fetch(MODEL, hub)
    errors_page.check(SECTION, "no network", shown(caught, hub))
    with pytest.raises(CheckpointError, match="offline use was asked for") as caught:
        fetch(MODEL, offline(hub))
    errors_page.check(SECTION, "offline, and not downloaded before", shown(caught, hub))


def test_a_complete_copy_serves_without_network(hub: Hub, server: HubServer) -> None:
    folder = fetch(MODEL, hub)
    server.down = True
    assert fetch(MODEL, hub) == folder


def test_too_little_disk_is_seen_before_the_start(hub: Hub, server: HubServer, errors_page: Any) -> None:
    server.sizes[WEIGHTS] = 10**18
    with pytest.raises(CheckpointError, match="no disk space") as caught:
        fetch(MODEL, hub)
    assert WEIGHTS not in dict(server.ranges)
    text = re.sub(r"needs [\d,]+ more", "needs (...) more", shown(caught, hub))
    errors_page.check(SECTION, "no disk space, seen before the start", text)


def test_a_disk_that_fills_up(hub: Hub, monkeypatch: pytest.MonkeyPatch, errors_page: Any) -> None:
    def full(*_: Any, dry_run: bool = False, **__: Any) -> list[Any]:
        if dry_run:
            return []
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "snapshot_download", full)
    with pytest.raises(CheckpointError, match="no disk space") as caught:
        fetch(MODEL, hub)
    errors_page.check(SECTION, "no disk space, seen on the way", shown(caught, hub))


def test_a_name_that_is_nothing(errors_page: Any) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        fetch("tyni", Hub())
    errors_page.check(SECTION, "a name that is neither folder nor model", str(caught.value))


def test_page_has_all_faults(errors_page: Any) -> None:
    errors_page.check_complete(SECTION, FAULTS)
