"""Checks of a request's head that the HTTP parser leaves open."""

from __future__ import annotations

import httptools

from octavo.server.error_responses import MalformedRequest

__all__ = ["check_framing", "origin_form"]


def check_framing(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that a proxy in front of the server could read differently (request smuggling).

    Args:
        version: the HTTP version of the head.
        headers: names in lower case.

    Raises:
        MalformedRequest: another version, or a transfer coding that is not supported.
    """
    if version not in ("1.0", "1.1"):
        raise MalformedRequest(f"HTTP {version} is not supported; use HTTP/1.1")
    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                raise MalformedRequest("Transfer-Encoding is not supported with HTTP/1.0; send Content-Length")
            if value.lower() != b"chunked":
                shown = value[:60].decode("ascii", "replace")
                raise MalformedRequest(f"Transfer-Encoding: {shown!a} is not supported; send chunked")


def origin_form(url: bytes, headers: list[tuple[bytes, bytes]], root_path: str = "") -> bytes:
    """The path and query of a request's target, without `root_path`.

    Args:
        url: the target as sent: a path, or an absolute URL as sent to a proxy.
        headers: names in lower case; the host of an absolute URL replaces that of the Host header (RFC 9112, 3.2.2).
        root_path: path under which a proxy publishes the server. The proxy may have removed it or not.

    Raises:
        MalformedRequest: the target is not a valid URL of scheme http or https.
    """
    try:
        parsed = httptools.parse_url(url)
        path: bytes = parsed.path or b"/"
        path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise MalformedRequest("The request URL is invalid") from None
    if parsed.schema is not None:
        if parsed.schema.lower() not in (b"http", b"https") or not parsed.host:
            raise MalformedRequest("The request URL does not have the scheme http or https")
        host = url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2]
        headers[:] = [(name, host if name == b"host" else value) for name, value in headers]
    root = root_path.encode()
    if root and (path == root or path.startswith(root + b"/")):
        path = path[len(root) :] or b"/"
    return path + b"?" + parsed.query if parsed.query else path
