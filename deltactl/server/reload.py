"""Have vLLM servers that lack deltactl's plugin load a step, by vLLM's own ``reload_weights``.

The step is rebuilt into a directory that the servers see under the same path, once each server has
been looked at, and every server reads all of it while it is paused. Nothing tells what is live
before or after: a reload that failed, or whose answer was lost, leaves weights that nobody knows,
and the server paused. The label that clients see says so meanwhile, and by it the next reload knows
the pause for its own.

That a reload went well does not prove that the model computes with what was loaded. So only servers
are asked for one of whose kind a test has shown it (``layouts``), and each answers a short prompt
before the step is called served. Without the plugin nothing can be asked of a server that is
paused: it is resumed for that, and paused again where the answer is noise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from math import isfinite
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, TypeVar

from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.core.errors import DeltactlError, Malformed, Transient, UsageError
from deltactl.core.progress import Progress, silent
from deltactl.ops.pull import PullReport, check_apart, materialize
from deltactl.server.apply import Applied
from deltactl.server.fleet import Met, noting, side_by_side, urls_of
from deltactl.server.goal import check_forward
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import Dead, Refused
from deltactl.server.layouts import check_layout
from deltactl.server.model import Specs, check_model, specs_at
from deltactl.server.preflight import BACKEND, check_routes, check_version, draft_notes
from deltactl.server.report import Replica
from deltactl.server.update import DEFAULTS, Options

T = TypeVar("T")

_PROMPT, _LIKELIEST = range(1, 9), 5
"""Tokens that every model has, and how many of those that may follow are looked at."""

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

    Nothing is fetched but headers before the servers have been looked at, and no weights where none
    of them can load the step. Raises what ``pull`` raises, UsageError; what becomes of a single
    server is in the report.
    """
    urls, place = urls_of(urls), directory.resolve()
    check_apart(bucket, place)
    chain = read_chain(bucket)
    step = chain.numbered(step)
    aim = chain.tip if step is None else step
    if aim is not None:
        chain.need(aim)
    reports, stop = {url: Replica(url) for url in urls}, threading.Event()

    def each(act: Callable[[_Reload], None], at: int | None) -> bool:
        """Of the servers with which nothing is wrong; whether the user has interrupted it."""
        known = bucket.url if at is None else f"{bucket.url}@{at}"
        target = f"{known} --via reload --reload-dir {directory}"

        def one(url: str) -> Replica:
            report = reports[url]
            with noting(report), closing(Server(url, options.timeout)) as server:
                act(_Reload(server, report, options, target))
            return report

        left = [url for url in urls if reports[url].error is None]
        return side_by_side(one, left, stop, on_interrupt)[1]

    tensors, met = specs_at(chain, aim), Met()

    def look(reload: _Reload) -> None:
        reload.look(tensors, met)
        if step is None:
            check_forward(chain, chain.wanted(None), reload.labelled)

    interrupted = each(look, aim)
    if interrupted or all(report.error is not None for report in reports.values()):
        each(_Reload.give_up, aim)
        wanted = chain.wanted(step)
        newer = () if step is not None else chain.newer(wanted)
        return Applied(wanted, chain.state_at(wanted), [*reports.values()], interrupted, newer)
    pulled = materialize(bucket, chain, place, step=step, progress=progress)
    interrupted = each(lambda reload: reload.run(place, pulled, stop), pulled.step)
    return Applied(pulled.step, pulled.state, [*reports.values()], interrupted, pulled.newer)


def _model_of(configuration: Mapping[str, Any]) -> Path:
    """Where the server's model lies, as it says."""
    model = configuration.get("model_config")
    return Path(str(model.get("model"))) if isinstance(model, dict) else Path()


class _Reload:
    """One server's reload. All but the reload itself may be done twice, and is where it fails."""

    def __init__(self, server: Server, report: Replica, options: Options, target: str) -> None:
        self._server, self._report, self._options = server, report, options
        self._again = f"deltactl apply {quote(target)} --server {server.url}"
        self._since = 0.0  # when the pause was asked for

    def look(self, tensors: Specs, met: Met) -> None:
        """Raise what stands between the server and a reload of a checkpoint of these tensors."""
        server = self._server
        check_version(server)
        self._report.paused = check_routes(server)
        configuration = server.configuration()
        transfer = configuration.get("weight_transfer_config")
        if isinstance(transfer, dict) and transfer.get("backend") == BACKEND:
            what = "the server runs deltactl's plugin, which would not know of a reload"
            raise UsageError(what, file=server.url, hint="leave out --via reload")
        identity = configuration.get("instance_id")
        met.meet(identity if isinstance(identity, str) else None, server.url)
        self._report.notes += draft_notes(configuration.get("speculative_config"))
        check_model(configuration, tensors, server.url)
        self._check_layout(_model_of(configuration))
        if not self._report.paused:
            self._ask(before=True)

    @property
    def labelled(self) -> int | None:
        """The step that the server tells its clients."""
        label = self._server.label()
        return int(label) if label.isascii() and label.isdigit() else None

    def give_up(self) -> None:
        """Before anything was asked for."""
        raise self._interrupted()

    def run(self, place: Path, pulled: PullReport, stop: threading.Event) -> None:
        """Have it reload what was pulled to ``place``."""
        server, report, step = self._server, self._report, pulled.step
        paused = check_routes(server)
        self._check_layout(place)
        before = server.label()
        report.step_before = self.labelled
        held = paused and not before.startswith(MARK)
        report.paused = paused
        if stop.is_set():
            raise self._interrupted()
        _twice(lambda: server.set_label(f"{MARK}{step}"))
        self._since = monotonic()
        if not held:
            self._pause(before)
        if stop.is_set():
            self._rest(held, before)
            raise self._interrupted()
        self._load(place)
        self._rest(held, str(step), loaded=True)
        report.how, report.step_after, report.state = "reload", step, pulled.state
        if held:
            report.notes.append(
                "was paused already, and is left paused: what it answers is not known"
            )

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
        except Dead:
            raise
        except DeltactlError as error:
            raise Malformed(
                "the reload failed: the weights are in an unknown state, and the server is left "
                "paused",
                file=self._server.url,
                found=str(error),
                hint=f"see that the server has {place}, and that its model is that of the chain, "
                f"then {self._again}; where that fails too, restart the server",
            ) from None

    def _rest(self, held: bool, label: str, *, loaded: bool = False) -> None:
        if not self._options.keep_cache and not _twice(self._server.clear_prefixes):
            raise DeltactlError("the caches were not cleared", file=self._server.url)
        if not held:
            _twice(self._server.resume)
            self._report.paused = False
            if loaded:
                self._report.seconds_paused = monotonic() - self._since
                self._ask_or_pause()
        _twice(lambda: self._server.set_label(label))  # until then the pause is known for ours

    def _check_layout(self, model: Path) -> None:
        check_layout(self._server.configuration(), model, self._server.url)

    def _ask(self, *, before: bool = False) -> None:
        """Raise Malformed where a short prompt is answered with noise; ``before`` the reload, where
        that is to mend it, only what keeps the server from being asked at all."""
        server = self._server
        found: object = None
        try:
            told = _twice(lambda: server.logprobs(server.model(), _PROMPT, _LIKELIEST))
            if not all(map(isfinite, told)) or len(set(told)) < 2:
                found = f"log probabilities {told}"
        except Refused as error:
            if error.status == 404:
                raise
            found = error.found  # vLLM cannot put into JSON what is no number
        if found is not None and not before:
            raise Malformed("a short prompt is answered with noise", file=server.url, found=found)

    def _ask_or_pause(self) -> None:
        try:
            self._ask()
        except Dead:
            raise
        except DeltactlError as error:
            self._report.paused = None
            _twice(lambda: self._server.pause("abort", clear_cache=True))
            self._report.paused = True
            raise Malformed(
                "after the reload the server does not answer as it should; it is paused again, but "
                "requests may have been answered meanwhile",
                file=self._server.url,
                found=str(error),
                hint="pull the step, and start the server anew on it",
            ) from None

    def _interrupted(self) -> DeltactlError:
        what = "interrupted before the weights were written"
        return DeltactlError(what, file=self._server.url, hint=self._again)


def _twice(work: Callable[[], T]) -> T:
    try:
        return work()
    except (Transient, Refused):
        return work()
