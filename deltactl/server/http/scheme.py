"""``http://`` where a server speaks TLS, ``https://`` where it does not, and certificates."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

import requests

from deltactl.core.errors import DeltactlError, NotAllowed, UsageError

_PROBE = 5.0  # seconds for a connection, and for a handshake
_OTHER = {"http": "https", "https": "http"}


def fault_of_scheme(url: str, error: requests.RequestException) -> DeltactlError | None:
    """What is wrong with the scheme of ``url``, to which a first request met ``error``; None where
    that is not the reason."""
    parts = urlsplit(url)
    if isinstance(error, requests.exceptions.SSLError):
        return _of_tls(url, str(error))
    ended = isinstance(error, requests.ConnectionError) and not isinstance(error, requests.Timeout)
    if parts.scheme == "http" and ended and _speaks_tls(str(parts.hostname), parts.port or 80):
        return _other(url, "the server speaks https at this port")
    return None


def _of_tls(url: str, why: str) -> DeltactlError:
    """For a handshake that failed."""
    if "CERTIFICATE_VERIFY_FAILED" not in why:
        return _other(url, "the server does not speak https at this port")
    return NotAllowed(
        "the server's certificate is not to be trusted",
        file=url,
        found=why[why.index("CERTIFICATE_VERIFY_FAILED") :].split("(_ssl")[0].strip("] "),
        hint="name its authority's file with REQUESTS_CA_BUNDLE, if you trust it",
    )


def _other(url: str, what: str) -> UsageError:
    scheme, rest = url.split("://", 1)
    return UsageError(what, file=url, hint=f"--server {_OTHER[scheme.lower()]}://{rest}")


def _speaks_tls(host: str, port: int) -> bool:
    """Whether a handshake succeeds; with whom does not matter, as nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _PROBE) as raw:
            raw.settimeout(_PROBE)
            with context.wrap_socket(raw, server_hostname=host):
                return True
    except OSError:
        return False
