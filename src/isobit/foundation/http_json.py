"""JSON over HTTP with bounds: on the time, on the size of an answer, and on where it may come from.

A server's answer is material from outside. At most `largest` bytes are read, until `timeout` seconds after the request.
Redirects are not followed, since the key would travel with them, and proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from isobit.errors import ServerError
from isobit.foundation.files import read_bytes
from isobit.foundation.plain_text import one_line

LARGEST = 64 << 20  # bytes of an answer
LONGEST_KEY = 4096
QUOTED = 300  # characters of a server's own words that an error shows


def refuse(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise ServerError."""
    raise ServerError(expected=expected, received=received, remedy=remedy)


def read_key(path: Path) -> str:
    """Return the API key in a file; errors do not show it."""
    try:
        text = read_bytes(path, LONGEST_KEY).decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    return check_key(text, f"the contents of {path}")


def check_key(text: str, source: str) -> str:
    """Return a key that fits into a header; raise, without showing it, for any other."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        refuse(
            "a key: one word of printable ASCII characters",
            f"{source}, which is not",
            "write the key alone into the file, without quotes",
        )
    return text


@dataclass(frozen=True)
class Reply:
    """A server's answer."""

    address: str
    status: int
    data: bytes

    @property
    def words(self) -> str:
        """The beginning of the answer on one line, for errors."""
        text = one_line(self.data[: 4 * QUOTED].decode("utf-8", "replace"))
        return text[:QUOTED] + ("…" if len(text) > QUOTED else "")

    def json(self) -> Any:
        """Return the answer; raise if it is not JSON. NaN and infinities are not JSON."""
        try:
            return json.loads(self.data, parse_constant=_not_json)
        except (ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {one_line(str(error))[:QUOTED]}"
            refuse(
                f"JSON from {self.address}",
                f"{len(self.data):,} bytes that are not ({why}): {self.words}",
                "check that the address is that of the server's API",
            )


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


class Exchange:
    """A request that was sent, whose answer was not read yet."""

    def __init__(
        self, address: str, connection: HTTPConnection, deadline: float, largest: int
    ) -> None:
        self._address, self._connection = address, connection
        self._deadline, self._largest = deadline, largest

    def finish(self) -> Reply:
        """Wait for the answer and read it within the bounds.

        Raises:
            ServerError: If it does not arrive in time, is too large, or the connection ends.
        """
        # A socket's own timeout begins again with every byte: an answer that drips would never end.
        late = threading.Event()
        watch = threading.Timer(
            max(self._deadline - time.monotonic(), 0), cut, (self._connection.sock, late)
        )
        watch.daemon = True
        watch.start()
        try:
            with self._connection.getresponse() as response:
                data = self._read(response)
            if late.is_set():
                raise TimeoutError
            return Reply(self._address, response.status, data)
        except (OSError, HTTPException, ValueError) as error:
            refuse_failure(self._address, TimeoutError() if late.is_set() else error)
        finally:
            watch.cancel()
            self._connection.close()

    def _read(self, response: HTTPResponse) -> bytes:
        found = bytearray()
        while part := response.read1(1 << 16):
            found += part
            if len(found) > self._largest:
                refuse(
                    f"at most {self._largest:,} bytes from {self._address}",
                    "more",
                    "ask for less, such as fewer prompts or tokens; or allow more by largest=",
                )
        return bytes(found)


def cut(connection: socket.socket, late: threading.Event) -> None:
    """End a connection whose time is over; whoever reads from it wakes up."""
    late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Server:
    """An HTTP server that speaks JSON.

    Args:
        url: Its address, with or without /v1 at the end.
        key: Sent as a bearer token, if given.
        timeout: Seconds for a request, from sending to the last byte of the answer.
        largest: Bytes of an answer.

    Raises:
        ServerError: If the address is not plain http or https.
    """

    def __init__(
        self, url: str, key: str = "", timeout: float = 60.0, largest: int = LARGEST
    ) -> None:
        parts = check_url(url)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._root}"
        self._key, self._timeout, self._largest = key, timeout, largest

    def get(self, path: str) -> Reply:
        """Return the answer to GET."""
        return self.send("GET", path).finish()

    def post(self, path: str, body: object) -> Reply:
        """Return the answer to POST of a JSON body."""
        return self.send("POST", path, body).finish()

    def send(self, method: str, path: str, body: object = None) -> Exchange:
        """Send a request on a connection of its own, and return before the answer."""
        address = f"{self.url}{path}"
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        deadline = time.monotonic() + self._timeout
        connection = self._connect()
        try:
            connection.request(method, f"{self._root}{path}", data, headers)
        except (OSError, HTTPException) as error:
            connection.close()
            refuse_failure(address, error)
        return Exchange(address, connection, deadline, self._largest)

    def _connect(self) -> HTTPConnection:
        host = str(self._host)
        if self._secure:
            context = ssl.create_default_context()
            return HTTPSConnection(host, self._port, timeout=self._timeout, context=context)
        return HTTPConnection(host, self._port, timeout=self._timeout)


def check_url(url: str) -> SplitResult:
    """Return the parts of an address; raise unless it is http or https, without user, query or fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port  # read for its check
    except ValueError:
        parts, port = urlsplit(""), None
    plain = url.isascii() and url.isprintable() and " " not in url and port != 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        refuse(
            "an address such as http://localhost:8000",
            repr(url[:QUOTED]),
            "name the server by http:// or https://, host and port",
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        refuse(
            "an address without a user, a password, ? or #, since reports print it",
            f"one with them, of {parts.hostname}",
            "pass a key by --key-file FILE or the environment variable OPENAI_API_KEY",
        )
    return parts


def refuse_failure(address: str, error: Exception) -> NoReturn:
    """Raise ServerError for a connection that failed."""
    if isinstance(error, TimeoutError):
        refuse(
            f"an answer of {address} in time",
            "none: the time ran out",
            "check that the server is idle and healthy, or pass a longer --timeout",
        )
    if isinstance(error, socket.gaierror):
        received = f"an unknown host: {error.strerror}"
    elif isinstance(error, ssl.SSLError):
        received = f"a failed TLS handshake: {error.reason}"
    elif isinstance(error, ConnectionRefusedError):
        received = "nobody who listens there"
    else:
        received = (
            f"a connection that failed: {type(error).__name__}: {one_line(str(error))[:QUOTED]}"
        )
    refuse(
        f"a server at {address}",
        received,
        "start the server, and check scheme, host and port of the address",
    )
