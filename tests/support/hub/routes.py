"""The routes: the Hub's REST API of buckets, and the Xet protocol's."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.support.hub.cas import Term

if TYPE_CHECKING:
    from tests.support.hub.server import HubStandIn


@dataclass(frozen=True)
class Entry:
    """A file of a bucket."""

    hash: str
    size: int
    uploaded: str


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(value: object, status: int = 200, **headers: str) -> Answer:
        return Answer(status, json.dumps(value).encode(), headers)


class Reply(Exception):
    """An answer from within: mostly a refusal."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def refusal(status: int, text: str, code: str | None = None) -> Reply:
    """As the Hub refuses: the reason in the body, in a header, and maybe as a word."""
    headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
    return Reply(Answer(status, json.dumps({"error": text}).encode(), headers))


@dataclass
class Request:
    hub: HubStandIn
    route: str
    match: re.Match[str] | None
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    failures: str | None

    def part(self, number: int) -> str:
        assert self.match is not None
        return unquote(self.match[number] or "")

    def byte_range(self, size: int) -> tuple[int, int] | None:
        """Start and stop of the range that is asked for; None for no range."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            return None
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
        if start >= size:
            raise Reply(Answer(416, headers={"Content-Range": f"bytes */{size}"}))
        return start, stop

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def role(self) -> str | None:
        """What the Hub's token may do; None without one."""
        if self.token and self.token not in self.hub.tokens:
            raise refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(self.token)

    def bucket(self, *, write: bool = False) -> dict[str, Entry]:
        """The bucket that the path names, if the token may do that."""
        name, role = self.part(1), self.role()
        hidden = name in self.hub.private and role is None
        if name not in self.hub.buckets or hidden:
            raise refusal(404, "Repository not found", "RepoNotFound")
        if write and role is None:
            raise refusal(401, "Unauthorized")
        if write and role != "write":
            raise refusal(403, "You don't have write access")
        return self.hub.buckets[name]

    def cas_access(self, *scopes: str) -> None:
        if self.hub.cas_tokens.get(self.token) not in scopes:
            raise refusal(401, "no token of the store")


Handler = Callable[[Request], Answer]
_ROUTES: list[tuple[str, str, re.Pattern[str], Handler]] = []


def _route(name: str, method: str, pattern: str) -> Callable[[Handler], Handler]:
    """Register a handler. ``name`` is what counters and faults call the route."""

    def register(handler: Handler) -> Handler:
        _ROUTES.append((name, method, re.compile(pattern), handler))
        return handler

    return register


def route_of(method: str, path: str) -> tuple[str, re.Match[str] | None]:
    for name, wanted, pattern, _ in _ROUTES:
        if method == wanted and (match := pattern.fullmatch(path)):
            return name, match
    return "unknown", None


def handle(request: Request) -> Answer:
    for name, _, pattern, handler in _ROUTES:
        if name == request.route and request.match and request.match.re is pattern:
            return handler(request)
    return Answer.of({"error": "no such route"}, 404)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _row(path: str, entry: Entry) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": entry.size,
        "xetHash": entry.hash,
        "mtime": entry.uploaded,
        "uploadedAt": entry.uploaded,
    }


_BUCKET = r"/api/buckets/([^/]+/[^/]+)"


@_route("create", "POST", _BUCKET)
def _create(request: Request) -> Answer:
    name = request.part(1)
    if request.role() != "write":
        raise refusal(403, "You don't have the rights to create a bucket here")
    with request.hub.lock:
        if name in request.hub.buckets:
            raise refusal(409, "You already created this bucket")
        request.hub.buckets[name] = {}
    return Answer.of({"url": f"{request.hub.url}/buckets/{name}", "name": name})


@_route("info", "GET", _BUCKET)
def _info(request: Request) -> Answer:
    files = request.bucket().values()
    size = sum(entry.size for entry in files)
    facts = {"id": request.part(1), "private": False, "createdAt": _now()}
    return Answer.of(facts | {"size": size, "totalFiles": len(files)})


@_route("tree", "GET", _BUCKET + "/tree(?:/(.*))?")
def _tree(request: Request) -> Answer:
    """Recursive, in pages; the prefix is matched letter by letter, as the Hub does."""
    bucket, prefix = request.bucket(), request.part(2)
    with request.hub.lock:
        names = sorted(name for name in bucket if name.startswith(prefix))
        start = int(request.query.get("cursor", 0))
        stop = start + request.hub.page
        rows = [_row(name, bucket[name]) for name in names[start:stop]]
    if stop >= len(names):
        return Answer.of(rows)
    assert request.match is not None
    url = f"{request.hub.url}{request.match.string}?recursive=True&cursor={stop}"
    return Answer.of(rows, Link=f'<{url}>; rel="next"')


@_route("paths-info", "POST", _BUCKET + "/paths-info")
def _paths_info(request: Request) -> Answer:
    bucket = request.bucket()
    with request.hub.lock:
        wanted = json.loads(request.body)["paths"]
        return Answer.of([_row(path, bucket[path]) for path in wanted if path in bucket])


@_route("batch", "POST", _BUCKET + "/batch")
def _batch(request: Request) -> Answer:
    """Not transactional: what can be done is done, and the rest is told."""
    bucket = request.bucket(write=True)
    operations = [json.loads(line) for line in request.body.splitlines() if line]
    failed = []
    with request.hub.lock:
        for operation in operations:
            why = request.failures or _apply(request.hub, bucket, operation)
            if why:
                failed.append({"path": operation["path"], "error": why})
    done = len(operations) - len(failed)
    facts = {"success": not failed, "processed": len(operations), "succeeded": done}
    return Answer.of(facts | {"failed": failed}, 200 if done else 422)


def _apply(hub: HubStandIn, bucket: dict[str, Entry], operation: dict[str, Any]) -> str | None:
    path = operation["path"]
    if operation["type"] == "deleteFile":
        return None if bucket.pop(path, None) else "file not found"
    if operation["type"] != "addFile":
        return "unknown operation"
    if not path or path.startswith("/") or path.endswith("/") or re.search(r"//|\.\./|\\|\0", path):
        return "invalid path"
    if not hub.cas.has(operation["xetHash"]):
        return "no such content"
    size = hub.cas.size(operation["xetHash"])
    bucket[path] = Entry(operation["xetHash"], size, _now())
    return None


@_route("token", "GET", _BUCKET + "/xet-(read|write)-token")
def _token(request: Request) -> Answer:
    scope = request.part(2)
    request.bucket(write=scope == "write")
    token, expires = secrets.token_hex(16), int(time.time()) + 3600
    request.hub.cas_tokens[token] = scope
    return Answer.of(
        {"casUrl": request.hub.url, "exp": expires, "accessToken": token},
        **{
            "X-Xet-Cas-Url": request.hub.url,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(expires),
        },
    )


def _resolve(request: Request) -> Answer:
    """What is known of a file, and where its bytes are: on another host, as with the real one."""
    bucket, path = request.bucket(), request.part(2)
    entry = bucket.get(path)
    if entry is None:
        raise refusal(404, "Entry not found", "EntryNotFound")
    hub = request.hub
    auth = f"{hub.url}/api/buckets/{request.part(1)}/xet-read-token"
    place = f"{hub.url.replace('127.0.0.1', 'localhost')}/file/{entry.hash}"
    headers = {
        "X-Xet-Hash": entry.hash,
        "X-Linked-Size": str(entry.size),
        "Link": f'<{auth}>; rel="xet-auth"',
        "Location": f"{place}?signature={hub.signature}",
    }
    return Answer(302, headers=headers)


_FILE = r"/buckets/([^/]+/[^/]+)/resolve/(.+)"
_route("resolve", "GET", _FILE)(_resolve)
_route("head", "HEAD", _FILE)(_resolve)


@_route("file", "GET", "/file/([0-9a-f]{64})")
def _get_file(request: Request) -> Answer:
    """A signed address, as of a CDN: whoever has it may read; what knows who asks is a leak."""
    if request.query.get("signature") != request.hub.signature or request.token:
        raise refusal(403, "bad signature, or a token that is not for here")
    name = request.part(1)
    size = request.hub.cas.size(name)
    start, stop = request.byte_range(size) or (0, size)
    headers = {"Content-Type": "application/octet-stream"}
    if "Range" in request.headers:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(
        206 if "Range" in request.headers else 200,
        request.hub.cas.content(name)[start:stop],
        headers,
    )


# The content-addressed store.

_HASH = "([0-9a-f]{64})"


@_route("xorb-grant", "POST", "/v1/xorb-grants/.*")
@_route("known-chunk", "GET", "/v1/chunks/.*")
@_route("telemetry", "POST", "/v1/telemetry")
def _nothing(request: Request) -> Answer:
    """What a client asks for and does without."""
    return Answer.of({"error": "not here"}, 404)


@_route("xorb-put", "POST", f"/v1/xorbs/[^/]+/{_HASH}")
def _put_xorb(request: Request) -> Answer:
    request.cas_access("write")
    new = request.part(1) not in request.hub.cas.xorbs
    request.hub.cas.add_xorb(request.part(1), request.body)
    return Answer.of({"was_inserted": new})


@_route("shard-put", "POST", "/v2/shards")
def _put_shard(request: Request) -> Answer:
    request.cas_access("write")
    request.hub.cas.add_shard(request.body)
    return Answer(200, b'{"type":"result"}\n', {"Content-Type": "application/x-ndjson"})


@_route("reconstruction", "GET", f"/v2/reconstructions/{_HASH}")
def _reconstruction(request: Request) -> Answer:
    request.cas_access("read", "write")
    cas, name = request.hub.cas, request.part(1)
    if not cas.has(name):
        raise refusal(404, "no such file")
    start, stop = request.byte_range(cas.size(name)) or (0, cas.size(name))
    skip, terms = cas.terms_of(name, start, stop)
    xorbs: dict[str, list[Any]] = {}
    for term, _ in terms:
        xorbs.setdefault(term.xorb, []).append(_piece(request.hub, term))
    listed = [
        {"hash": t.xorb, "unpacked_length": n, "range": {"start": t.first, "end": t.last}}
        for t, n in terms
    ]
    return Answer.of({"offset_into_first_range": skip, "terms": listed, "xorbs": xorbs})


def _piece(hub: HubStandIn, term: Term) -> dict[str, Any]:
    """Where the bytes of a term's chunks are."""
    offsets = hub.cas.xorbs[term.xorb].offsets
    chunks = {"start": term.first, "end": term.last}
    places = {"start": offsets[term.first], "end": offsets[term.last] - 1}
    url = f"{hub.url}/data/{term.xorb}?signature={hub.signature}"
    return {"url": url, "ranges": [{"chunks": chunks, "bytes": places}]}


@_route("xorb-get", "GET", f"/data/{_HASH}")
def _get_xorb(request: Request) -> Answer:
    """A signed address, as of a CDN: whoever has it may read."""
    if request.query.get("signature") != request.hub.signature:
        raise refusal(403, "bad signature")
    data = request.hub.cas.xorbs[request.part(1)].data
    asked = request.byte_range(len(data))
    if asked is None:
        raise refusal(416, "a range is required")
    start, stop = asked
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
    }
    return Answer(206, data[start:stop], headers)
