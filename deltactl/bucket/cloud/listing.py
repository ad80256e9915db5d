"""Listings of an object store, whole or refused.

A listing that is not whole looks like a chain without its newest links, or without any, so none is
believed that may be: AWS's client is asked page by page, as obstore takes a page that goes on and
does not say where for the last one. Google's listing is asked for once more, from its end; of
Microsoft's there is nothing else to see. No listing goes in circles for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen
from xml.etree import ElementTree

from botocore import handlers

from deltactl.bucket.cloud.aws import translated as of_aws
from deltactl.bucket.cloud.obstore_errors import translated as of_obstore
from deltactl.bucket.cloud.pages import pages
from deltactl.bucket.cloud.refusals import Place, endless, senseless, truncated, unreachable
from deltactl.chain.store import Object
from deltactl.files.names import is_relative

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from obstore.store import ObjectStore

_PAGE = 1000
_LARGEST = 1 << 20  # bytes of a page that lists nothing
_ROWS = "DeltactlRows"


class Listing(Protocol):
    """Lists what is below a place: also unfinished uploads where these are objects."""

    def __call__(self) -> Iterable[Object]:
        """All of it. Raises core.errors: Malformed for what may not be all."""
        ...


class S3Listing:
    """By AWS's client, of which ``client`` is one that nobody else uses. Its own reader takes 15
    times as long for a page, so it gets what is read here."""

    def __init__(self, client: BaseClient, place: Place) -> None:
        self._place = place
        events = client.meta.events
        if (judge := getattr(handlers, "_handle_200_error", None)) is not None:
            events.unregister("before-parse.s3.*", judge)  # takes what is cut for a busy server
        events.register_first("before-parse.s3.ListObjectsV2", _read_page)
        asked = "before-parameter-build.s3.ListObjectsV2"
        events.unregister(asked, handlers.set_list_objects_encoding_type_url)
        self._ask = partial(
            client.list_objects_v2,  # type: ignore[attr-defined]
            Bucket=place.bucket,
            Prefix=place.key(""),
        )

    def __call__(self) -> Iterator[Object]:
        prefix, seen = self._place.key(""), _Seen(self._place)
        tokens = {"ContinuationToken": "NextContinuationToken"}
        with of_aws(self._place):
            for page in pages(self._ask, self._place, _ROWS, tokens):
                for key, size, modified in page[_ROWS]:
                    if not key.startswith(prefix):
                        raise senseless(self._place, None)
                    name = key.removeprefix(prefix)
                    if is_relative(name):  # others are not ours: marks of folders and the like
                        yield seen.new(Object(name, size, modified))


def _read_page(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    """Read a page of a listing, and leave nothing for botocore to read but an error."""
    body = response_dict["body"]
    if response_dict["status_code"] != 200:
        return
    response_dict["body"] = b""
    try:
        root = ElementTree.fromstring(body)
        found = {_tag(child): child.text for child in root}
        rows = [_row(child) for child in root if _tag(child) == "Contents"]
    except (ElementTree.ParseError, ValueError, KeyError, TypeError):
        return
    if _tag(root) == "Error":  # which S3 finds too late to say it in the status
        response_dict |= {"body": body, "status_code": 500}
    elif _tag(root) == "ListBucketResult":
        more = {"true": True, "false": False}.get(str(found.get("IsTruncated")).strip())
        customized_response_dict["IsTruncated"] = more
        customized_response_dict["NextContinuationToken"] = found.get("NextContinuationToken")
        customized_response_dict[_ROWS] = rows


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _row(element: ElementTree.Element) -> tuple[str, int, float]:
    found = {_tag(child): child.text for child in element}
    size, when = int(str(found["Size"])), datetime.fromisoformat(str(found["LastModified"]))
    if size < 0:
        raise ValueError
    return found["Key"] or "", size, when.timestamp()


class ObstoreListing:
    """By obstore. ``ordered``: whether the store can be asked for what comes after a name, in an
    order of names; ``seconds``: for each thousand objects; ``check``: raises where a listing of
    nothing may be no listing."""

    def __init__(
        self,
        store: ObjectStore,
        place: Place,
        pool: Executor,
        *,
        ordered: bool,
        seconds: float,
    ) -> None:
        self._store, self._place, self._pool = store, place, pool
        self._ordered, self._seconds = ordered, seconds
        self.check: Callable[[], None] = lambda: None

    def __call__(self) -> list[Object]:
        with of_obstore(self._place):
            found = self._pool.submit(asyncio.run, self._list(None)).result()
            if not found:
                self.check()
            if found and self._ordered:
                last = max((item.name for item in found), key=str.encode)
                if self._pool.submit(asyncio.run, self._list(last)).result():
                    raise truncated(self._place)
        return found

    async def _list(self, after: str | None) -> list[Object]:
        found, seen = list[Object](), _Seen(self._place)
        stream = aiter(self._store.list(offset=after, chunk_size=_PAGE))
        while True:
            try:  # pages without objects, for ever, never come back from here
                page = await asyncio.wait_for(anext(stream, None), self._seconds)
            except TimeoutError:
                raise unreachable("Timeout", self._place, None) from None
            if page is None:
                return found
            for item in page:
                if item["path"]:
                    when = item["last_modified"].timestamp()
                    found.append(seen.new(Object(item["path"], item["size"], when)))


def check_emulator(endpoint: str, place: Place, seconds: float) -> None:
    """Ask what stands in for Google's store once more, of which obstore takes any page of XML for a
    listing of nothing. Raises Malformed, and Transient where it does not answer now."""
    query = urlencode({"list-type": "2", "prefix": place.key("")})
    asked = Request(f"{endpoint.rstrip('/')}/{quote(place.bucket)}?{query}")
    asked.add_header("Authorization", "Bearer none")
    try:
        with urlopen(asked, timeout=seconds) as reply:
            root = ElementTree.fromstring(reply.read(_LARGEST))
    except OSError:
        raise unreachable("Broken", place, None) from None
    except (ElementTree.ParseError, HTTPException):
        raise senseless(place, None) from None
    goes_on = {_tag(child): str(child.text).strip() for child in root}.get("IsTruncated")
    if _tag(root) != "ListBucketResult" or goes_on not in ("true", "false"):
        raise senseless(place, None)
    if goes_on == "true":
        raise truncated(place)


class _Seen:
    """Refuses what a listing has twice."""

    def __init__(self, place: Place) -> None:
        self._place, self._names = place, set[str]()

    def new(self, item: Object) -> Object:
        """The object. Raises Malformed if its name was there already."""
        if item.name in self._names:
            raise endless(self._place)
        self._names.add(item.name)
        return item
