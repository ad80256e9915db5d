"""Many mutants, several at a time, within a time; and a log to go on from."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.running import ROOT, Copy, Fate

Asked = Mapping[str, Sequence[Mutant]]
Fates = dict[str, dict[Mutant, Fate]]
Tell = Callable[[str, Mutant, Fate], None]


class Campaign:
    """Runs mutants of ``tests``' modules in ``jobs`` copies of ``root``, which are made in
    ``scratch``. ``log``: a file that what is found is added to, and in which killed mutants of
    unchanged modules, and what the tests took in an unchanged checkout, are looked up first."""

    def __init__(
        self,
        tests: Mapping[str, tuple[str, ...]],
        scratch: Path,
        *,
        jobs: int,
        log: Path | None = None,
        root: Path = ROOT,
    ) -> None:
        self._tests, self._jobs, self._root = tests, jobs, root
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            self._copies.put(Copy(scratch / f"copy_{number}", root))
        self._log, self._lock = log, threading.Lock()
        self._usual: dict[frozenset[str], float] = {}

    def run(self, asked: Asked, seconds: float, tell: Tell) -> Fates:
        """What becomes of the mutants; of those that no time is left for, nothing. Raises Useless
        where a module's tests fail as they are."""
        end = monotonic() + seconds
        found: Fates = {module: dict(self._known(module, asked[module])) for module in asked}
        groups = {frozenset(self._tests[module]): self._tests[module] for module in asked}

        def work(one: tuple[str, Mutant]) -> None:
            if monotonic() < end:
                module, mutant = one
                found[module][mutant] = fate = self._fate(module, mutant)
                tell(module, mutant, fate)

        with ThreadPoolExecutor(self._jobs) as pool:
            list(pool.map(self._measure, groups.values()))
            left = [one for one in _in_turn(asked) if one[1] not in found[one[0]]]
            list(pool.map(work, left))
        return found

    def _measure(self, tests: tuple[str, ...]) -> None:
        group = frozenset(tests)  # in whatever order
        row = {"tests": sorted(group), "source": self._digest(*self._everything())}
        known = [past["seconds"] for past in self._noted() if past.items() >= row.items()]
        if not known:
            copy = self._copies.get()
            try:
                known = [copy.without_fault(tests)]
            finally:
                self._copies.put(copy)
            self._note(row | {"seconds": known[0]})
        self._usual[group] = known[0]

    def _fate(self, module: str, mutant: Mutant) -> Fate:
        tests = self._tests[module]
        copy = self._copies.get()
        try:
            fate = copy.fate(module, mutant, tests, self._usual[frozenset(tests)])
        finally:
            self._copies.put(copy)
        row = {"module": module, "source": self._digest(module), "name": mutant.name}
        self._note(row | asdict(fate))
        return fate

    # The log.

    def _digest(self, *files: str) -> str:
        content = b"".join((self._root / file).read_bytes() for file in files)
        return hashlib.sha256(content).hexdigest()

    def _everything(self) -> list[str]:
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.rglob("*.py"))

    def _note(self, row: Mapping[str, Any]) -> None:
        if self._log is not None:
            with self._lock, open(self._log, "a") as file:
                print(json.dumps(row), file=file)

    def _noted(self) -> list[dict[str, Any]]:
        if self._log is None or not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def _known(self, module: str, asked: Sequence[Mutant]) -> Iterator[tuple[Mutant, Fate]]:
        """Of a module that is what it was, those that were killed. What survived is tried again, as
        there may be a test by now."""
        names = {mutant.name: mutant for mutant in asked}
        same = {"module": module, "source": self._digest(module)}
        for row in self._noted():
            if row.items() >= same.items() and tuple(row["name"]) in names:
                fate = Fate(row["what"], row["seconds"], row["by"])
                if not fate.survived:
                    yield names[tuple(row["name"])], fate


def _in_turn(asked: Asked) -> Iterator[tuple[str, Mutant]]:
    """One of each module after the other, so that a time that is up leaves out some of each."""
    rows = [[(module, mutant) for mutant in each] for module, each in asked.items()]
    return (one for one in chain.from_iterable(zip_longest(*rows)) if one is not None)
