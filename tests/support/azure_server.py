"""A server of Azure blobs (Azurite) on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from uuid import uuid4

from tests.support.s3_server import free_ports
from tests.support.tools import need

ACCOUNT = "deltactl"
KEY = base64.b64encode(b"the secret of the tests").decode()
CONTAINER = "chains"
_DEADLINE = 60.0


@dataclass(frozen=True)
class AzureServer:
    """``endpoint``: http://127.0.0.1:PORT/ACCOUNT."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment to get here."""
        return {
            "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;"
            f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint};"
        }

    def new_url(self) -> str:
        """The address of a prefix that nobody else has, in the server's one container."""
        return f"az://{CONTAINER}/{uuid4().hex[:12]}"


@contextmanager
def run_azure_server() -> Iterator[AzureServer]:
    """A server with its data in memory, which ends with the block."""
    program = need("azurite-blob")
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [program, "--blobPort", str(port), "--blobHost", "127.0.0.1", *_OPTIONS],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            )
        try:
            server = AzureServer(f"http://127.0.0.1:{port}/{ACCOUNT}")
            deadline = time.monotonic() + _DEADLINE
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the Azure server did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield server
        finally:
            process.kill()
            process.wait()


_OPTIONS = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]


def _answers(server: AzureServer) -> bool:
    """Whether the container is there, made now or by an earlier try."""
    now = formatdate(usegmt=True)
    path = server.endpoint.removeprefix("http://").partition("/")[2]
    text = (
        f"PUT{chr(10) * 12}x-ms-date:{now}\nx-ms-version:2021-08-06\n"
        f"/{ACCOUNT}/{path}/{CONTAINER}\nrestype:container"
    )
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"{server.endpoint}/{CONTAINER}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": now,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
        },
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 409
    except OSError:
        return False
    return True
