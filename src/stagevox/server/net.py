"""Fetching from the internet on a client's behalf, without becoming its way into the operator's network.

A host must be allowed by name; all addresses that it resolves to must be public; the connection goes to an address that was
checked, whatever the name resolves to a moment later. Each redirect starts over.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from stagevox.errors import BadMediaError

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

# Networks through which an IPv6 address reaches an IPv4 one, and where that stands: bits from the right.
_CARRIERS = {ipaddress.IPv6Network("64:ff9b::/96"): 0, ipaddress.IPv6Network("2002::/16"): 80}


def is_public(address: Address) -> bool:
    """True for an address on the open internet, looked at through what wraps it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        for network, shift in _CARRIERS.items():
            if address in network:
                return is_public(ipaddress.IPv4Address((int(address) >> shift) & 0xFFFFFFFF))
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Fetcher:
    """Fetches from ``domains`` (``host`` for the usual ports, or ``host:port``), at most ``max_bytes`` within ``seconds``."""

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        seconds: float,
        *,
        resolve: Resolve = resolve,
        may_connect: Callable[[Address], bool] = is_public,
        trusted: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._max_bytes, self._seconds = max_bytes, seconds
        self._resolve, self._may_connect = resolve, may_connect
        self._trusted = cache(trusted)  # takes tens of milliseconds

    async def fetch(self, url: str, field: str) -> bytes:
        """The body behind ``url``.

        Raises:
            BadMediaError: not allowed, not there, too large or too slow; ``field`` is its name.
        """
        try:
            async with asyncio.timeout(self._seconds):
                for _ in range(MAX_REDIRECTS + 1):
                    data, url = await self._hop(url, field)
                    if data is not None:
                        return data
        except TimeoutError:
            raise BadMediaError(field, f"could not be fetched within {self._seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise BadMediaError(field, f"could not be fetched: {type(error).__name__}") from error
        raise BadMediaError(field, f"more than {MAX_REDIRECTS} redirects")

    async def _hop(self, url: str, field: str) -> tuple[bytes | None, str]:
        """``(body, url)``, or ``(None, where the answer redirects to)``."""
        parts, host, port = self._checked(url, field)
        address = await self._address(host, port, field)
        netloc = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        pinned = parts._replace(netloc=netloc, fragment="").geturl()
        headers = {"Host": parts.netloc, "Accept-Encoding": "identity", "User-Agent": "stagevox"}
        async with httpx.AsyncClient(
            verify=self._trusted() if parts.scheme == "https" else False,
            trust_env=False,
            follow_redirects=False,
            timeout=self._seconds,
        ) as client:
            request = client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": host})
            response = await client.send(request, stream=True)
            try:
                if response.has_redirect_location:
                    return None, urljoin(url, response.headers["location"])
                if response.status_code != 200:
                    raise BadMediaError(field, f"could not be fetched: status {response.status_code}")
                return await self._read(response, field), url
            finally:
                await response.aclose()

    def _checked(self, url: str, field: str) -> tuple[SplitResult, str, int]:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
        if parts.scheme not in PORTS or not host or parts.username is not None or parts.password is not None:
            raise BadMediaError(field, "not a plain http or https URL")
        usual = port is None or port == PORTS[parts.scheme]
        if not ((usual and host in self._domains) or f"{host}:{port or PORTS[parts.scheme]}" in self._domains):
            raise BadMediaError(field, f"media may not be fetched from {parts.netloc[:100]!r}")
        return parts, host, port or PORTS[parts.scheme]

    async def _address(self, host: str, port: int, field: str) -> str:
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._may_connect(ipaddress.ip_address(one.partition("%")[0])) for one in addresses):
            raise BadMediaError(field, f"media may not be fetched from {host[:100]!r}: its address is not public")
        return addresses[0]

    async def _read(self, response: httpx.Response, field: str) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadMediaError(field, "could not be fetched: it came compressed")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > self._max_bytes:
                raise BadMediaError(field, f"more than {self._max_bytes} bytes")
        return bytes(data)
