"""What a request's head must say, and what it asks for, where the parser leaves that open."""

from __future__ import annotations

import urllib.parse

import httptools

from octavo.server.error_responses import MalformedRequest

__all__ = ["check_framing", "target_of"]


def check_framing(version: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Refuse what another server could read differently.

    Args:
        version: of HTTP, as the head says.
        headers: names in lower case.

    Returns:
        Whether the client waits for `100 Continue` before it sends its body.

    Raises:
        MalformedRequest.
    """
    if version not in ("1.0", "1.1"):
        raise MalformedRequest(f"HTTP {version} is not spoken here; use HTTP/1.1")
    expects_continue = False
    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                raise MalformedRequest("Transfer-Encoding: is not for HTTP/1.0; send Content-Length")
            if value.lower() != b"chunked":
                shown = value[:60].decode("ascii", "replace")
                raise MalformedRequest(f"Transfer-Encoding: {shown!a} is not supported; send chunked")
        elif name == b"expect":
            expects_continue = version == "1.1" and value.lower() == b"100-continue"
    return expects_continue


def target_of(url: bytes, headers: list[tuple[bytes, bytes]], root_path: str = "") -> tuple[str, bytes, bytes]:
    """What a request asks for.

    Args:
        url: the request's target: a path, or absolute as for a proxy.
        headers: names in lower case; an absolute target's host replaces the header's (RFC 9112, 3.2.2).

        root_path: under which a proxy shows the server, and which it has cut off the path or has not.

    Returns:
        (path below `root_path` and with it, the same as it was sent, query).

    Raises:
        MalformedRequest: it is no target of an origin server.
    """
    try:
        parsed = httptools.parse_url(url)
        raw_path: bytes = parsed.path or b"/"
        path = raw_path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise MalformedRequest("The request's URL is none") from None
    if parsed.schema is not None:
        if parsed.schema.lower() not in (b"http", b"https") or not parsed.host:
            raise MalformedRequest("The request's URL is not of the scheme http or https")
        host = url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2]
        headers[:] = [(name, host if name == b"host" else value) for name, value in headers]
    if "%" in path:
        path = urllib.parse.unquote(path)
    if root_path and path != root_path and not path.startswith(root_path + "/"):
        path, raw_path = root_path + path, root_path.encode() + raw_path
    return path, raw_path, parsed.query or b""
