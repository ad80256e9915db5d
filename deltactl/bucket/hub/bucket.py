"""A bucket of the Hugging Face Hub, through ``huggingface_hub`` and Xet."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from hf_xet import hash_files
from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import BucketBatchError
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from deltactl import __version__
from deltactl.bucket.hub.calls import calls, check_online, endpoint, listing, session
from deltactl.chain.store import Object
from deltactl.core.errors import Malformed, Transient, UsageError
from deltactl.files.atomic import temporary_file
from deltactl.files.names import check_object_name, is_relative
from deltactl.files.temporary import Outcome, Unfinished

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_FORM = "hf://buckets/NAMESPACE/NAME[/PREFIX]"


class HubBucket:
    """Implements chain.store.Bucket. Creation is not atomic: the Hub has no conditional write.

    Which Hub, and who asks, is what ``huggingface_hub`` finds: HF_ENDPOINT, HF_TOKEN, the token
    that ``hf auth login`` keeps. Nothing is tried twice but single requests of Xet's. Raises
    UsageError for an address of another form, and in offline mode.

    Requests that the Hub counts: ``list`` one for each 1000 objects, ``read`` one (of the larger
    allowance, for downloads), ``fetch`` one and two of those, ``put`` four.
    """

    def __init__(self, url: str, jobs: int = 16) -> None:
        self._id, self._prefix = _parse(url)
        self._jobs = jobs
        check_online()
        self._api = HfApi(endpoint=endpoint(), library_name="deltactl", library_version=__version__)

    @property
    def url(self) -> str:
        return f"hf://buckets/{self._id}/{self._prefix}".rstrip("/")

    @property
    def atomic_create(self) -> bool:
        return False

    @property
    def jobs(self) -> int:
        return self._jobs

    @property
    def part_bytes(self) -> int | None:
        return None

    def list(self) -> Iterator[Object]:
        with calls(self._id, self.url), listing():
            tree = self._api.list_bucket_tree(self._id, self._prefix or None, recursive=True)
            found = [
                (item.path, item.size, item.uploaded_at or item.mtime)
                for item in tree
                if isinstance(item, BucketFile)
            ]
        names = set()
        for path, size, when in found:
            if not isinstance(path, str) or not isinstance(size, int) or size < 0 or path in names:
                raise Malformed("the Hub's listing makes no sense", file=self.url, found=repr(path))
            names.add(path)
            if path.startswith(self._prefix):
                modified = None if when is None else when.timestamp()
                yield Object(path.removeprefix(self._prefix), size, modified)

    def read(self, name: str, start: int, stop: int) -> bytes:
        key = self._key(name)
        if stop <= start:
            return b""
        url = f"{self._api.endpoint}/buckets/{self._id}/resolve/{quote(key, safe='')}"
        headers = build_hf_headers(library_name="deltactl", library_version=__version__) | {
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        with (
            calls(self._id, self._place(key)),
            session().stream("GET", url, headers=headers) as response,
        ):
            if response.status_code == 416:
                return b""
            begins = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if not (begins if response.status_code == 206 else start == 0):
                raise Malformed("the Hub sent another range than it was asked for")
            data = bytearray()
            for piece in response.iter_raw():
                data += piece
                if len(data) >= stop - start:
                    break
            return bytes(data[: stop - start])

    def fetch(self, name: str, target: Path) -> None:
        """As the protocol says. The size is checked here; the Hub's client checks nothing."""
        key = self._key(name)
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        with calls(self._id, self._place(key)):
            known = self._api.get_bucket_file_metadata(self._id, key)
            file = BucketFile(  # type: ignore[no-untyped-call]
                type="file", path=key, size=known.size, xetHash=known.xet_file_data.file_hash
            )
            with temporary_file(target) as (_, temporary):
                self._api.download_bucket_files(self._id, [(file, temporary)])
                if (size := temporary.stat().st_size) != known.size:
                    what = "the object came in another size than the Hub says it has"
                    raise Malformed(what, expected=known.size, found=size)
                os.rename(temporary, target)

    def path(self, name: str) -> Path | None:
        self._key(name)
        return None

    def put(self, name: str, source: Path) -> bool:
        """Look, write, and look again: True only if what is there then is this file's content.

        Nothing stops two who put one name at once from both finding it free. The later write
        replaces the earlier, and the earlier's putter is told False if it looks after that, and
        True if before: then what it has put is gone. So a chain on the Hub is for one publisher.
        A bucket that does not exist is not created, as who may see it is not for us to say.
        """
        key, size = self._key(name), source.stat().st_size
        with calls(self._id, self._place(key)):
            if self._look(key) is not None:
                return False
            self._api.batch_bucket_files(self._id, add=[(source, key)])
            found = self._look(key)
            if found is None:
                raise Transient("the Hub took the object, and does not have it")
            return bool(found.size == size and found.xet_hash == hash_files([str(source)])[0].hash)

    def delete(self, name: str) -> None:
        key = self._key(name)
        with calls(self._id, self._place(key)):
            try:
                self._api.batch_bucket_files(self._id, delete=[key])
            except BucketBatchError:
                if self._look(key) is not None:
                    raise

    def unfinished(self) -> Iterable[Unfinished]:
        """Nothing: what was uploaded and not named in a batch is the Hub's own to remove."""
        return ()

    def discard(self, item: Unfinished, before: float) -> Outcome:
        raise AssertionError("it lists nothing that could be discarded")

    def _look(self, key: str) -> BucketFile | None:
        found = self._api.get_bucket_paths_info(self._id, [key])
        return next((file for file in found if file.path == key), None)

    def _key(self, name: str) -> str:
        """The object's name in the bucket. Raises UsageError for what the Hub would not take."""
        if "\\" in name:
            raise UsageError("no plain name of an object", file=name)
        return self._prefix + check_object_name(name)

    def _place(self, key: str) -> str:
        return f"hf://buckets/{self._id}/{key}"


def _parse(url: str) -> tuple[str, str]:
    """The bucket's name with its namespace, and the prefix, which ends with "/" or is empty.

    A prefix without that slash would name all that begins with the same letters too.
    """
    rest = url.partition("://")[2]
    if re.search(r"[?#]", rest) or "@" in "/".join(rest.split("/")[:3]):
        what = "the address holds a user, a password or a query"  # and may not be repeated
        raise UsageError(what, expected=_FORM, hint="set HF_TOKEN, or hf auth login")
    kind, *parts = [part for part in rest.split("/") if part] or [""]
    plain = is_relative("/".join(parts)) and "\\" not in rest
    named = len(parts) >= 2 and all(_NAME.fullmatch(part) for part in parts[:2])
    if kind != "buckets" or not plain or not named:
        raise UsageError("no address of a bucket of the Hub", file=url, expected=_FORM)
    return "/".join(parts[:2]), "".join(f"{part}/" for part in parts[2:])
