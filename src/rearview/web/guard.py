"""Check every request to the page's server before it is handled.

Names of runs, logged texts and source are untrusted input for the page, and other web pages in the same
browser are a danger to the server. So the guard allows only Host headers that name this machine (against DNS
rebinding) and only requests from the server's own page. It requires a token for all data, and POST for every
change. Its content security policy lets the browser run only the scripts in the page's own files.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = 64 << 10
"""Maximum number of bytes in the body of a request."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
"""HTTP headers that are added to every answer."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Passes each request on to `app`, or refuses the request with a reason."""

    app: App
    token: str
    host: str
    """The address that the server is bound to."""
    writable: bool
    """Whether POST requests are allowed, which start backfills and change tags, notes and so on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (an ASGI call): refuse it, or pass it on to `app`; add `HEADERS` to the answer."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin1").lower(): value.decode("latin1")
            for name, value in scope["headers"]
        }
        refused = self.refusal(scope["method"], scope["path"], headers)

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                extra_headers = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                if scope["path"].startswith("/api/"):
                    extra_headers.append((b"cache-control", b"no-store"))
                message["headers"] = [*message.get("headers", ()), *extra_headers]
            await send(message)

        if refused is not None:
            await _answer(guarded, *refused)
            return
        await self.app(scope, _bounded(receive), guarded)

    def refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return (HTTP status, reason) if a request is refused, or None if it is allowed.

        >>> guard = Guard(None, "secret", "127.0.0.1", writable=False)
        >>> guard.refusal("GET", "/api/state", {"host": "evil.example:80"})
        (403, 'This server answers only to names of this machine.')
        >>> guard.refusal("GET", "/api/state", {"host": "localhost:80"})[0]
        401
        """
        host = headers.get("host", "")
        if not self._names_this_machine(host):
            return 403, "This server answers only to names of this machine."
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "This server answers only to its own page."
        if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"} and not (
            path == "/" and headers.get("sec-fetch-mode") == "navigate"
        ):
            return 403, "This server answers only to its own page."
        if method not in {"GET", "HEAD", "POST"}:
            return 405, "Only GET and POST are known here."
        if not headers.get("content-length", "0").isdigit() or (
            int(headers.get("content-length", "0")) > MOST_BODY
        ):
            return 413, f"A request has at most {MOST_BODY} bytes."
        if not path.startswith("/api/"):
            return (405, "Read this with GET.") if method == "POST" else None
        if not self._has_token(headers.get("authorization", "")):
            return 401, "The token is missing or wrong. `rearview ui` prints a link that has it."
        if method == "POST" and not self.writable:
            return 403, "This page is read-only. Start it with `rearview ui --allow-replay`."
        if method == "POST" and headers.get("content-type", "").split(";")[0] != "application/json":
            return 415, "Send JSON."
        return None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, secret = authorization.partition(" ")
        matches = hmac.compare_digest(
            secret.strip().encode("utf-8", "replace"), self.token.encode()
        )
        return scheme.lower() in {"bearer", "token"} and matches

    def _names_this_machine(self, host: str) -> bool:
        """Return True if the Host header `host` names this machine, in a form that a DNS entry cannot imitate."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        if name == "localhost":
            return True
        bound_address = _address(self.host)
        local = bound_address is not None and bound_address.is_loopback
        address = _address(name)
        if address is not None:
            return address.is_loopback if local else True
        return not local and name in {self.host.lower(), socket.gethostname().lower()}


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if name == "localhost" else name)
    except ValueError:
        return None


def _bounded(receive: Receive) -> Receive:
    """Return a function like `receive` that reports a disconnect once a body exceeds `MOST_BODY` bytes."""
    received_bytes = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MOST_BODY:
            return {"type": "http.disconnect"}
        return message

    return bounded


async def _answer(send: Send, status: int, text: str) -> None:
    body = msgspec.json.encode({"error": text})
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
