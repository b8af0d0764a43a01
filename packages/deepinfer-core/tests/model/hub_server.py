"""A Hugging Face Hub on this machine: the few routes of the real one that a download uses, and ways to fail."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, override

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """What the server has and how it behaves; tests change it between requests.

    files     name -> content of the only model
    sizes     sizes that differ from the content's, as the listing tells them
    refuses   status and error code of every answer, such as (403, "GatedRepo")
    cut       name of a file that is sent up to its middle once
    dies      be `down` after that
    down      close every connection without an answer
    ranges    (file, Range header) of every download that was asked for
    """

    model: str
    files: dict[str, bytes]
    sizes: dict[str, int] = field(default_factory=dict)
    refuses: tuple[int, str] | None = None
    cut: str | None = None
    dies: bool = False
    down: bool = False
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def hub_server(model: str, files: dict[str, bytes]) -> Iterator[HubServer]:
    """Serve `model` on a free port of this machine while the context is open."""
    state = HubServer(model, files)

    class Handler(_Handler):
        hub = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        name = self.hub.model
        if self.hub.down:
            self.close_connection = True
        elif self.hub.refuses is not None:
            status, code = self.hub.refuses
            self._send(status, b"{}", {"X-Error-Code": code}, with_body=with_body)
        elif re.fullmatch(f"/api/models/{name}(/revision/(main|{COMMIT}))?", path):
            files = [{"rfilename": file, "size": size} for file, size in self._listing()]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": files}, with_body)
        elif path.startswith(f"/api/models/{name}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        elif path.startswith(f"/api/models/{name}/tree/"):
            entries = [{"type": "file", "path": f, "size": size, "oid": self._etag(f)} for f, size in self._listing()]
            self._json(entries, with_body)
        elif match := re.fullmatch(f"/{name}/resolve/[^/]+/(.+)", path):
            self._file(match[1], with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def _listing(self) -> list[tuple[str, int]]:
        return [(name, self.hub.sizes.get(name, len(data))) for name, data in self.hub.files.items()]

    def _etag(self, name: str) -> str:
        return hashlib.sha1(self.hub.files[name], usedforsecurity=False).hexdigest()

    def _file(self, name: str, with_body: bool) -> None:
        data = self.hub.files[name]
        asked = self.headers.get("Range")
        headers = {"ETag": f'"{self._etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.hub.sizes:
            headers["X-Linked-Size"] = str(self.hub.sizes[name])
        status, start = 200, 0
        if with_body:
            self.hub.ranges.append((name, asked))
        if asked and (match := re.fullmatch(r"bytes=(\d+)-", asked)):
            status, start = 206, int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if with_body and self.hub.cut == name:
            self.hub.cut, self.hub.down = None, self.hub.dies
            self.close_connection = True
            self._head(status, len(data) - start, headers)
            self.wfile.write(data[start : len(data) // 2])
        else:
            self._send(status, data[start:], headers, with_body=with_body)

    def _json(self, value: object, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self._head(status, len(body), headers)
        if with_body:
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
