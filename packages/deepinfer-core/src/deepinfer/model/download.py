"""From the name of a model to a folder of files: a local folder as it is, or a download from the Hugging Face Hub.

Only safetensors and JSON files are fetched. Checking what they hold is `checkpoint.py`'s.
"""

import errno
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from deepinfer.errors import CheckpointError

PATTERNS = ("*.safetensors", "*.json")
"""All that is ever downloaded: tensors and JSON, no pickle and no code."""

CONFIG_ONLY = ("config.json",)
"""Enough to plan a model that has not been downloaded."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """How the Hub is reached; None leaves a choice to the huggingface_hub library and its environment variables.

    cache_dir  where downloads are kept
    endpoint   address of the Hub
    token      for gated and private models
    revision   branch, tag or commit
    offline    use only what is in `cache_dir`
    quiet      show no progress bars (they are never shown when stderr is no terminal)
    """

    cache_dir: Path | None = None
    endpoint: str | None = None
    token: str | None = None
    revision: str | None = None
    offline: bool = False
    quiet: bool = False


def fetch(model: str | Path, hub: Hub, patterns: tuple[str, ...] = PATTERNS) -> Path:
    """Return the folder of `model`: itself when it is a folder, else that of a download of the Hub's model.

    The download holds all files that match `patterns`, such as `CONFIG_ONLY`, and what was downloaded earlier.  A
    broken connection is resumed; a download that ended is continued by the next one, file by file: huggingface_hub
    gives every download a file of its own and removes it when it fails, so that an unfinished file starts anew.

    Raises CheckpointError for a folder that does not exist, a model that is unknown or gated, no network, and too
    little disk space, which is checked before the start.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder}: is a file; expected the folder of a checkpoint, with config.json in it")
    name = str(model)
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name}: no such folder; expected a checkpoint folder, a model of the Hugging Face Hub as OWNER/NAME, "
            'or "demo" for the embedded model'
        )
    return _download(name, hub, patterns)


class _SilentBar(tqdm):
    """A progress bar that is never shown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]


def _download(name: str, hub: Hub, patterns: tuple[str, ...]) -> Path:
    options: dict[str, Any] = {
        "revision": hub.revision,
        "cache_dir": hub.cache_dir,
        "endpoint": hub.endpoint,
        "token": hub.token,
        "allow_patterns": list(patterns),
        "tqdm_class": _SilentBar if hub.quiet else None,
    }
    cache = (hub.cache_dir or Path(constants.HF_HUB_CACHE)).expanduser()
    try:
        if not hub.offline:
            _check_space(name, cache, options)
        return Path(snapshot_download(name, local_files_only=hub.offline, **options))
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - the errors of the library's HTTP client differ by its version
        return _complete_copy(name, options, _explain(error, name, hub, cache))


def _complete_copy(name: str, options: dict[str, Any], fault: CheckpointError) -> Path:
    """Return an earlier, complete download, which needs no Hub; raises `fault` when there is none."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **options))
    except OSError:
        raise fault from None
    _log.warning("%s; using the complete copy in %s", fault, folder)
    return folder


def _check_space(name: str, cache: Path, options: dict[str, Any]) -> None:
    """Refuse a download that cannot fit before it starts; does nothing when the Hub cannot be asked."""
    try:
        files = snapshot_download(name, dry_run=True, **(options | {"tqdm_class": _SilentBar}))
    except OSError:
        return  # the download itself finds a complete copy in the cache, or says what is wrong
    needed = sum(file.file_size for file in files if file.will_download)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise _no_space(name, cache, f"needs {needed:,} more bytes, free are {free:,}")


def _no_space(name: str, cache: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: no disk space for the download in {cache}: {what}; free some, or choose another disk with HF_HOME; "
        "files that are complete are kept"
    )


def _explain(error: Exception, name: str, hub: Hub, cache: Path) -> CheckpointError:
    """Turn an error of the Hub library into one that says what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(name, cache, str(error))
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{name}: access to this model is gated; accept its terms on its page, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{name}: the Hub knows no such model, or it is private; check the name, or log in with `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{name}: the Hub knows no revision {hub.revision!r} of this model; check its name")
    if isinstance(error, LocalEntryNotFoundError):
        if (cache / f"models--{name.replace('/', '--')}" / "snapshots").exists():
            return CheckpointError(
                f"{name}: its download in {cache} is incomplete, and the Hub cannot be reached now; connect to the "
                "network and run the same command again: it fetches what is missing"
            )
        reason = "offline use was asked for" if hub.offline else "the Hub cannot be reached"
        return CheckpointError(
            f"{name}: is not in {cache}, and {reason}; connect to the network and run the same command again, or give "
            "the folder of a copy"
        )
    return CheckpointError(
        f"{name}: the download was interrupted ({type(error).__name__}: {error}); run the same command again: "
        "complete files are kept, it fetches the others"
    )
