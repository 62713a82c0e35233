"""A small hub on 127.0.0.1: as much of the hub's interface as fetching a repository takes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by id, each a map of file names to bytes; `requests` logs (method, path)."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        return {path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path}


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                repository, rest = "/".join(parts[2:4]), parts[4:]
                if repository in hub.gated:
                    return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
                if repository not in hub.repositories:
                    return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
                files = hub.repositories[repository]
                if rest[:1] == ["tree"]:
                    listed = [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in files.items()
                    ]
                    return self._send(200, json.dumps(listed).encode(), {}, body)
                info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                return self._send(200, json.dumps(info).encode(), {}, body)
            repository, name = "/".join(parts[:2]), "/".join(parts[4:])
            data = hub.repositories.get(repository, {}).get(name)
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self._send(200, data, headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
