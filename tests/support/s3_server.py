"""A real S3 server (SeaweedFS) on loopback, for the tests of buckets and the benchmarks."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.tools import need

ACCESS_KEY, SECRET_KEY = "AKIDdeltactltests", "the/secret+of/deltactl+tests"
BUCKET = "deltactl-tests"
_DEADLINE = 60.0


@dataclass(frozen=True)
class S3Server:
    """``endpoint``: http://127.0.0.1:PORT, where the one pair of keys may do everything."""

    endpoint: str

    def client(self) -> Any:
        """A client of AWS's own, with the keys."""
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 1}),
        )

    def new_url(self) -> str:
        """The address of a prefix that nobody else has, in the server's one bucket."""
        return f"s3://{BUCKET}/{uuid4().hex[:12]}"


def environment(endpoint: str) -> dict[str, str]:
    """The variables with which a client finds the server at ``endpoint``, which may be a proxy."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


def use_s3(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Have this process, and those that it starts, take S3 to be at ``endpoint``."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        patch.delenv(name, raising=False)
    for name, value in environment(endpoint).items():
        patch.setenv(name, value)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextlib.contextmanager
def run_s3_server() -> Iterator[S3Server]:
    """A server with its data in a temporary directory; both are gone afterwards."""
    program = need("weed")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "data").mkdir()
        (root / "s3.json").write_text(json.dumps(_identities()))
        ports = free_ports(9)
        with open(root / "log", "wb") as log:
            process = subprocess.Popen(
                [program, "-logtostderr", "server", *_options(root, ports)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=root,
            )
        try:
            server = S3Server(f"http://127.0.0.1:{ports[0]}")
            _await_ready(server, process, root / "log")
            yield server
        finally:
            process.kill()
            process.wait()


def _identities() -> dict[str, object]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]}


def _options(root: Path, ports: list[int]) -> list[str]:
    values: dict[str, object] = {
        "dir": root / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": ports[1],
        "master.port.grpc": ports[2],
        "volume.port": ports[3],
        "volume.port.grpc": ports[4],
        "filer.port": ports[5],
        "filer.port.grpc": ports[6],
        "s3.port": ports[0],
        "s3.port.grpc": ports[7],
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": root / "s3.json",
        "s3.autoCreateBucket": "false",
        "s3.localSocket": root / "s3.sock",
        "filer.localSocket": root / "filer.sock",
        "volume.max": 100,
        "master.volumeSizeLimitMB": 1024,
    }
    return ["-s3", *(f"-{name}={value}" for name, value in values.items())]


def _await_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll until an object can be put, which needs all of its services."""
    deadline = time.monotonic() + _DEADLINE
    while not _answers(server):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the S3 server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def _answers(server: S3Server) -> bool:
    client = server.client()
    try:
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
        client.delete_object(Bucket=BUCKET, Key="ready")
    except (BotoCoreError, ClientError):
        return False
    return True
