"""Have vLLM servers that lack deltactl's plugin load a step, by vLLM's own ``reload_weights``.

The step is rebuilt into a directory that the servers see under the same path, and every server
reads all of it while it is paused. Nothing tells what is live before or after: a reload that
failed, or whose answer was lost, leaves weights that nobody knows, and the server paused. The label
that clients see says so meanwhile, and by it the next reload knows the pause for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

from deltactl.core.errors import DeltactlError, Malformed, Transient, UsageError
from deltactl.core.progress import Progress, silent
from deltactl.core.pull import pull
from deltactl.core.store import Bucket
from deltactl.server.apply import Applied
from deltactl.server.fleet import as_error, side_by_side, urls_of
from deltactl.server.preflight import BACKEND, check_routes, check_version
from deltactl.server.report import Replica
from deltactl.server.routes import Server
from deltactl.server.update import DEFAULTS, Options
from deltactl.server.wire import Refused

T = TypeVar("T")

MARK = "reloading to step "
"""Begins the weight version of a server whose weights are being reloaded."""


def reload_servers(
    bucket: Bucket,
    step: int | None,
    urls: Sequence[str],
    directory: Path,
    options: Options = DEFAULTS,
    *,
    progress: Progress = silent,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Applied:
    """Rebuild a step in ``directory``, as ``pull`` does, and have each server reload it from there.

    Raises what ``pull`` raises, UsageError; what becomes of a single server is in the report.
    """
    urls = urls_of(urls)
    place = directory.resolve()
    pulled = pull(bucket, place, step=step, progress=progress)
    target = f"{bucket.url}@{pulled.step} --via reload --reload-dir {directory}"
    stop = threading.Event()

    def one(url: str) -> Replica:
        report = Replica(url)
        try:
            server = Server(url, options.timeout)
            try:
                _Reload(server, report, options, target).run(place, pulled.step, stop)
            finally:
                server.close()
        except Exception as error:
            report.error = as_error(error)
        if report.error is None:
            report.state = pulled.state
        return report

    replicas, interrupted = side_by_side(one, urls, stop, on_interrupt)
    return Applied(pulled.step, pulled.state, replicas, interrupted, pulled.newer)


class _Reload:
    """One server's reload. All but the reload itself may be done twice, and is where it fails."""

    def __init__(self, server: Server, report: Replica, options: Options, target: str) -> None:
        self._server, self._report, self._options = server, report, options
        self._again = f"deltactl apply {target} --server {server.url}"

    def run(self, place: Path, step: int, stop: threading.Event) -> None:
        server, report = self._server, self._report
        check_version(server)
        paused = check_routes(server)
        transfer = server.configuration().get("weight_transfer_config")
        if isinstance(transfer, dict) and transfer.get("backend") == BACKEND:
            what = "the server runs deltactl's plugin, which would not know of a reload"
            raise UsageError(what, file=server.url, hint="leave out --via reload")
        before = server.label()
        report.step_before = int(before) if before.isascii() and before.isdigit() else None
        held = paused and not before.startswith(MARK)
        report.paused = paused
        if stop.is_set():
            raise self._interrupted()
        _twice(lambda: server.set_label(f"{MARK}{step}"))
        since = monotonic()
        if not held:
            self._pause(before)
        if stop.is_set():
            self._rest(held, before)
            raise self._interrupted()
        self._load(place)
        self._rest(held, str(step))
        report.how, report.step_after = "reload", step
        if held:
            report.notes.append("was paused already, and is left paused")
        else:
            report.seconds_paused = monotonic() - since

    def _pause(self, before: str) -> None:
        clear = not self._options.keep_cache
        self._report.paused = None
        try:
            _twice(lambda: self._server.pause(self._options.pause, clear_cache=clear))
        except DeltactlError:
            self._rest(False, before)  # it may be paused all the same
            raise
        self._report.paused = True

    def _load(self, place: Path) -> None:
        try:
            self._server.rpc("reload_weights", weights_path=str(place))
        except DeltactlError as error:
            raise Malformed(
                "the reload failed: the weights are in an unknown state, and the server is left "
                "paused",
                file=self._server.url,
                found=str(error),
                hint=f"see that the server has {place}, then {self._again}; where that fails too, "
                "restart the server",
            ) from None

    def _rest(self, held: bool, label: str) -> None:
        if not self._options.keep_cache and not _twice(self._server.clear_prefixes):
            raise DeltactlError("the caches were not cleared", file=self._server.url)
        if not held:
            _twice(self._server.resume)
            self._report.paused = False
        _twice(lambda: self._server.set_label(label))  # until then the pause is known for ours

    def _interrupted(self) -> DeltactlError:
        what = "interrupted before the weights were written"
        return DeltactlError(what, file=self._server.url, hint=self._again)


def _twice(work: Callable[[], T]) -> T:
    try:
        return work()
    except (Transient, Refused):
        return work()
