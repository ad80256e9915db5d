"""Find out what the tests do not notice: ``python -m tests.mutation [MODULE...]``

Modules are changed in one place after the other (``mutants``), in copies of the checkout, and their
tests (``targets``) are run each time. A mutant with which they all pass is printed as a row for
``explained.toml``: it wants a test, or a reason there. The exit status is 1 where one has neither.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deltactl.core.threads import cores
from tests.mutation.campaign import Asked, Campaign, Fates
from tests.mutation.explained import Explained, explained, row_for
from tests.mutation.mutants import Mutant, mutants, sampled
from tests.mutation.running import ROOT, Fate, Useless
from tests.mutation.targets import TARGETS, modules

HEAD = ("module", "mutants", "tried", "killed", "survived", "explained")


def main(arguments: Sequence[str] | None = None) -> int:
    settings = _settings(arguments)
    tests = modules(settings.modules)
    known = explained()
    everything = {module: mutants((ROOT / module).read_bytes()) for module in tests}
    asked: Asked = everything
    if settings.sample is not None:
        asked = {
            module: list(sampled(found, settings.sample, settings.seed))
            for module, found in everything.items()
        }

    def tell(module: str, mutant: Mutant, fate: Fate) -> None:
        if fate.survived and mutant.name not in known.get(module, {}):
            print(row_for(module, mutant), flush=True)

    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        campaign = Campaign(tests, Path(scratch), jobs=settings.jobs, log=settings.log)
        fates = campaign.run(asked, 60 * settings.minutes, tell)
    return _report(everything, asked, fates, known)


def _report(everything: Asked, asked: Asked, fates: Fates, known: Explained) -> int:
    """Print the figures; the exit status."""
    rows = {}
    for module, found in fates.items():
        survived = {mutant.name for mutant, fate in found.items() if fate.survived}
        reasons = known.get(module, {}).keys()
        killed = {mutant.name for mutant in found} - survived
        rows[module] = (
            len(everything[module]), len(found), len(killed), len(survived),
            len(survived & reasons),
        )  # fmt: skip
        for name in sorted(killed & reasons):
            print(f"explained, and killed now: {module}: {name}")
    total = tuple(map(sum, zip(*rows.values(), strict=True)))
    for row in (HEAD, *((module, *figures) for module, figures in rows.items()), ("all", *total)):
        print(f"{row[0]:<36}" + "".join(f"{figure:>11}" for figure in row[1:]))
    if left := sum(map(len, asked.values())) - total[1]:
        print(f"no time was left for {left} mutants")
    return int(total[3] > total[4])


def _settings(arguments: Sequence[str] | None) -> argparse.Namespace:
    described = (__doc__ or "").partition("\n")[2]
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=described)
    targets = ", ".join(TARGETS)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"by default {targets}")
    parser.add_argument("--sample", type=int, metavar="N", help="mutants of each module; all")
    parser.add_argument("--seed", type=int, default=0, help="which ones; 0")
    parser.add_argument("--jobs", type=int, default=cores(), help="at a time; one for each core")
    parser.add_argument("--minutes", type=float, default=600, help="none begins later; 600")
    parser.add_argument("--log", type=Path, help="to add to, and to go on from")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Useless, ValueError) as error:
        sys.exit(f"error: {error}")
