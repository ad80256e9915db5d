"""The links of a bucket, from its listing and the headers of its objects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from shlex import quote

from deltactl.chain.chain import Chain, Link
from deltactl.chain.header_reader import HeaderReader
from deltactl.chain.store import Bucket, Object
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound, Transient
from deltactl.core.threads import map_requests
from deltactl.format.anchor import INDEX, AnchorFile, AnchorHeader, parse_anchor, parse_anchor_index
from deltactl.format.delta_header import DeltaHeader, PartFile, parse_delta
from deltactl.format.delta_index import DELTA_INDEX, parse_delta_index
from deltactl.format.header import utf8
from deltactl.format.link_names import (
    LINK_NAME,
    anchor_directory,
    anchor_file_name,
    delta_directory,
    delta_name,
    is_in_directory,
)
from deltactl.format.metadata_check import check_steps

log = logging.getLogger("deltactl.chain")


def read_chain(bucket: Bucket) -> Chain:
    """Read the headers of all links, many at once. Raises what the bucket raises.

    What is wrong with single links is in ``problems``; they are left out of ``links``.
    """
    objects = [*bucket.list()]
    candidates = _candidates(objects)
    reader = HeaderReader(bucket)
    found = map_requests(lambda c: _read_link(reader, *c), candidates, bucket.jobs)
    kept: set[str] = set()  # all that lies beside an index which cannot be read, too
    for candidate, outcome in zip(candidates, found, strict=True):
        members = outcome.objects if isinstance(outcome, Link) else candidate[3]
        kept.update(item.name for item in members)
    unnamed = [o for o in objects if is_in_directory(o.name) and o.name not in kept]
    links = [outcome for outcome in found if isinstance(outcome, Link)]
    problems = [outcome for outcome in found if isinstance(outcome, DeltactlError)]
    problems += _twice(links)
    torn = _incomplete(links)
    links = [link for link in links if link.name not in torn]
    problems += torn.values()
    requests = 1 + reader.requests
    log.info("%s: %d links, headers read in %d requests", bucket.url, len(links), requests)
    return Chain(links, problems, reader.bytes_read, bucket.url, requests, unnamed)


def read_links(bucket: Bucket, names: Sequence[str]) -> list[Link]:
    """The links whose headers are in these objects, in the order given, and no others read.

    Raises NotFound for a name that no link has, what is wrong with a link, what the bucket raises.
    """
    candidates = {candidate[2]: candidate for candidate in _candidates(bucket.list())}
    for name in names:
        if name not in candidates:
            hint = f"deltactl log {quote(bucket.url)}"
            raise NotFound("the bucket has no such link", file=name, found=bucket.url, hint=hint)
    reader = HeaderReader(bucket)
    found = map_requests(lambda name: _read_link(reader, *candidates[name]), names, bucket.jobs)
    links = []
    for outcome in found:
        if isinstance(outcome, DeltactlError):
            raise outcome
        links.append(outcome)
    return links


_Candidate = tuple[str, int, str, tuple[Object, ...]]


def _candidates(objects: Iterable[Object]) -> list[_Candidate]:
    """(kind, step, name of the object with the header, objects) of all that look like links.

    A directory without an index is a link that was never finished, or is being written.
    """
    single: list[_Candidate] = []
    members: dict[tuple[str, int], list[Object]] = {}
    for item in objects:
        match = LINK_NAME.fullmatch(item.name)
        if match is None:
            continue
        kind, step = match["kind"], int(match["step"])
        file, directory, _ = _names(kind, step)
        if item.name == file:
            single.append((kind, step, file, (item,)))
        elif item.name.startswith(directory + "/"):
            members.setdefault((kind, step), []).append(item)
    for (kind, step), items in members.items():
        _, _, index = _names(kind, step)
        if any(item.name == index for item in items):
            single.append((kind, step, index, tuple(items)))
    return single


def _names(kind: str, step: int) -> tuple[str, str, str]:
    """Of a link: its one file, or else its directory and the index in it."""
    if kind == "delta":
        return delta_name(step), delta_directory(step), f"{delta_directory(step)}/{DELTA_INDEX}"
    return anchor_file_name(step), anchor_directory(step), f"{anchor_directory(step)}/{INDEX}"


def _read_link(
    reader: HeaderReader, kind: str, step: int, name: str, objects: tuple[Object, ...]
) -> Link | DeltactlError:
    """The link, or what is wrong with it."""
    size = next(item.size for item in objects if item.name == name)
    try:
        header: DeltaHeader | AnchorHeader
        if name.endswith("/" + INDEX):
            header = parse_anchor_index(reader.whole(name, size), name)
            objects = _objects_of(kind, header.files, objects, name)
        elif name.endswith("/" + DELTA_INDEX):
            header = parse_delta_index(reader.whole(name, size), name)
            objects = _objects_of(kind, header.files, objects, name)
        else:
            parsed = reader.header(kind, name, size)
            header = (parse_delta if kind == "delta" else parse_anchor)(parsed, name)
        check_steps(header, kind, step, name)
    except (NotAllowed, Transient):
        raise  # says nothing about the link
    except DeltactlError as error:
        error.step = step
        return error
    total = sum(item.size for item in objects)
    return Link(step, kind, name, total, header, objects)


def _objects_of(
    kind: str,
    files: Iterable[AnchorFile | PartFile],
    objects: tuple[Object, ...],
    index: str,
) -> tuple[Object, ...]:
    """The objects that the index names, and the index; each has to be there in its size."""
    directory = index.rsplit("/", 1)[0]
    sizes = {item.name: item.size for item in objects}
    found = [item for item in objects if item.name == index]
    for file in files:
        name = f"{directory}/{file.name}"
        if sizes.get(name) != file.nbytes:
            raise Malformed(
                f"a file of the {kind} is missing or has another size",
                file=name,
                expected=f"{file.nbytes} bytes",
                found="no such object" if name not in sizes else f"{sizes[name]} bytes",
            )
        found.append(Object(name, file.nbytes))
    return tuple(found)


def _incomplete(links: list[Link]) -> dict[str, DeltactlError]:
    """By name, the anchors that lack tensors which the one before them has.

    TRL has written such ones, of changed tensors alone. Ours name the state that they hold.
    """
    found: dict[str, DeltactlError] = {}
    known: set[str] = set()
    for link in sorted(links, key=lambda link: link.step):
        if not isinstance(link.header, AnchorHeader):
            continue
        names = {tensor.name for tensor in link.header.tensors}
        if link.result_state is None and (missing := known - names):
            found[link.name] = Malformed(
                "the anchor lacks tensors that the anchor before it has",
                file=link.name,
                tensor=min(missing, key=utf8),
                step=link.step,
                expected=f"{len(known)} tensors or more",
                found=f"{len(names)}, {len(missing)} of the others missing",
            )
        else:
            known = names
    return found


def _twice(links: list[Link]) -> list[DeltactlError]:
    seen: set[tuple[int, str]] = set()
    problems: list[DeltactlError] = []
    for link in links:
        if (link.step, link.kind) in seen:
            what = f"the step has two {link.kind}s"
            problems.append(Malformed(what, file=link.name, step=link.step))
        seen.add((link.step, link.kind))
    return problems
