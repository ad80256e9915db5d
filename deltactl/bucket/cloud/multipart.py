"""Large objects at S3: a multipart upload that is completed only where the name is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from deltactl.bucket.cloud.aws import refusal_of, translated
from deltactl.bucket.cloud.creation import TOKEN, Source
from deltactl.bucket.cloud.pages import pages
from deltactl.bucket.cloud.refusals import NOT_IMPLEMENTED, Place, no_conditions
from deltactl.core.threads import map_settled
from deltactl.files.temporary import Outcome, Unfinished

if TYPE_CHECKING:
    from botocore.client import BaseClient

PART_BYTES = 1 << 23
_MOST_PARTS = 10_000


class Multipart:
    """AWS documents that it judges the condition of CompleteMultipartUpload (If-None-Match: *) in
    the step that makes the object visible, as that of a single PUT: of all that complete one name,
    or put it, one succeeds. This has not been tried at AWS, and other servers need not do so:
    SeaweedFS 4.48 looks first and writes then, and of two at the same moment may tell both that
    they created the object, of which one is overwritten.

    obstore has no such upload (its multipart uploads overwrite), so AWS's own client makes it.
    Works up to 10,000 parts. A process that is killed leaves an unfinished upload, which is in no
    listing of objects, and which ``unfinished`` shows; a lifecycle rule of the bucket
    (AbortIncompleteMultipartUpload) removes such as well.
    """

    def __init__(self, client: BaseClient, place: Place, pool: Executor) -> None:
        self._client: Any = client
        self._place, self._pool = place, pool

    def create(self, name: str, source: Source, token: str) -> bool:
        with translated(self._place, name):
            target = {"Bucket": self._place.bucket, "Key": self._place.key(name)}
            upload = self._client.create_multipart_upload(**target, Metadata={TOKEN: token})
            target["UploadId"] = upload["UploadId"]
            created = False
            try:
                parts = self._send(target, source)
                created = self._complete(target, parts)
            finally:
                if not created:
                    with contextlib.suppress(Exception):  # what is raised already says more
                        self._client.abort_multipart_upload(**target)
            return created and self._is_ours(target, token)

    def _is_ours(self, target: dict[str, str], token: str) -> bool:
        """Look again: not every server judges the condition atomically."""
        found = self._client.head_object(Bucket=target["Bucket"], Key=target["Key"])
        return bool(found["Metadata"].get(TOKEN) == token)

    def _send(self, target: dict[str, str], source: Source) -> list[dict[str, object]]:
        size = max(PART_BYTES, -(-source.size // _MOST_PARTS))

        def send(start: int) -> dict[str, object]:
            number = start // size + 1
            data = source.piece(start, min(start + size, source.size))
            reply = self._client.upload_part(**target, PartNumber=number, Body=data)
            sums = {key: reply[key] for key in reply if key == "ETag" or key.startswith("Checksum")}
            return {"PartNumber": number, **sums}

        return map_settled(self._pool, send, range(0, source.size, size))

    def _complete(self, target: dict[str, str], parts: list[dict[str, object]]) -> bool:
        errors = self._client.exceptions
        try:
            self._client.complete_multipart_upload(
                **target, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
        except errors.ClientError as error:
            # NoSuchUpload: an earlier try succeeded, but its reply was lost.
            if error.response["Error"]["Code"] in _TAKEN:
                return False
            refusal = refusal_of(error.response)
            if refusal.status == NOT_IMPLEMENTED:
                name = target["Key"].removeprefix(self._place.key(""))
                raise no_conditions(refusal, self._place, name) from None
            raise
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        with translated(self._place):
            ask = partial(
                self._client.list_multipart_uploads,
                Bucket=self._place.bucket,
                Prefix=self._place.key(""),
            )
            tokens = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
            for page in pages(ask, self._place, "Uploads", tokens):
                for upload in page.get("Uploads", []):
                    key, begun = upload["Key"], upload["Initiated"].timestamp()
                    target = {
                        "Bucket": self._place.bucket,
                        "Key": key,
                        "UploadId": upload["UploadId"],
                    }
                    size, touched = self._sent(target, begun)
                    name = key.removeprefix(self._place.key(""))
                    where = f"{self._place.of(name)} (upload {upload['UploadId'][:8]})"
                    yield Unfinished("upload", name, where, size, touched, (target, begun))

    def _sent(self, target: Mapping[str, str], begun: float) -> tuple[int, float]:
        """The bytes of an upload's parts, and when the last came; (0, 0) where it is over."""
        size, touched = 0, begun
        tokens = {"PartNumberMarker": "NextPartNumberMarker"}
        ask = partial(self._client.list_parts, **target)
        try:
            for page in pages(ask, self._place, "Parts", tokens):
                for part in page.get("Parts", []):
                    size += part["Size"]
                    touched = max(touched, part["LastModified"].timestamp())
        except self._client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchUpload":
                raise
            return 0, 0.0
        return size, touched

    def discard(self, item: Unfinished, before: float) -> Outcome:
        target, begun = item.key
        with translated(self._place, item.name):
            if self._sent(target, begun)[1] >= before:
                return "in use"
            try:
                self._client.abort_multipart_upload(**target)
            except self._client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "NoSuchUpload":
                    raise
        return "removed"


_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchUpload"}
