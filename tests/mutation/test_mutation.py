"""The mutation run itself: it finds faults, notices which are noticed, and leaves all as it was."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation.campaign import Campaign, Fates
from tests.mutation.explained import explained, row_for
from tests.mutation.mutants import Mutant, mutants, sampled
from tests.mutation.running import ROOT, Copy, Fate, Useless
from tests.mutation.targets import TARGETS, modules


def faults(source: str) -> set[tuple[str, str]]:
    return {(one.was, one.now) for one in mutants(textwrap.dedent(source).encode())}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a: b = c", {("a", "True"), ("a", "False")}),
        ("if not a: raise b", {("not a", "True"), ("not a", "False")}),
        ("x = a or b", {("a or b", "(a)"), ("a or b", "(b)")}),
        ("x = a and b and c", {
            ("a and b and c", f"({each})") for each in ("b and c", "a and c", "a and b")
        }),
        ("x = a < b", {("a < b", "(a <= b)")}),
        ("x = a not in b", {("a not in b", "(a in b)")}),
        ("x = a < b <= c", {("a < b <= c", "(a <= b <= c)"), ("a < b <= c", "(a < b < c)")}),
        ("if a == b: c = d", {("a == b", "True"), ("a == b", "False")}),
        ("x = not a", {("not a", "(a)")}),
        ("x = a + b", {("a + b", "(a - b)")}),
        ("x += a", {("x += a", "x -= a")}),
        ("x = 7", {("7", "8")}),
        ("x = f(a, b=True, strict=True)", {("True", "False")}),
        ("f(a)", {("f(a)", "pass")}),
        ("raise A(7)", {("raise A(7)", "pass")}),
        ("for a in b: c = a", {("b", "()")}),
        ("x = [a for a in b if a]", {("a", "True")}),
        ("x = a if b else c", {("b", "True"), ("b", "False")}),
        ("x = any(a)", {("any", "all")}),
        ("x: Literal[1] = y", set()),
        ("'a text'; assert a == 1; x = f'{a + 1}'", set()),
    ],
)  # fmt: skip
def test_faults(line: str, expected: set[tuple[str, str]]) -> None:
    assert faults(f"def g(y: Literal[3]) -> Literal[4]:\n    {line}") == expected


SOURCE = textwrap.dedent("""
    class C:
        @cached(1)
        def é(self, a=1):
            if a == 1 and self.ü(1): raise ValueError("é")
            return a + 1
    """).encode()


def test_names_are_unique_and_each_fault_is_in_its_place() -> None:
    found = mutants(SOURCE)
    assert len({one.name for one in found}) == len(found)
    assert {one.where for one in found} == {"C.é"}
    for one in found:
        start, stop = one.span
        changed = one.applied(SOURCE)
        assert changed != SOURCE
        assert changed == SOURCE[:start] + one.now.encode() + SOURCE[stop:]
        assert ast.dump(ast.parse(SOURCE[start:stop].strip())) == ast.dump(ast.parse(one.was))
        ast.parse(changed)


def test_names_outlive_edits_elsewhere() -> None:
    moved = b"import os\n\n\ndef before():\n    return 1 + 1\n" + SOURCE
    names = {one.name for one in mutants(SOURCE)}
    assert names <= {one.name for one in mutants(moved)}


def test_a_sample_is_the_same_whatever_else_there_is() -> None:
    found = mutants(SOURCE)
    few = list(sampled(found, 3, seed=1))
    assert len(few) == 3
    assert few == list(sampled(found[::-1], 3, seed=1))[::-1]
    assert len({tuple(sampled(found, 3, seed)) for seed in range(9)}) > 1
    assert list(sampled(found, 99, seed=1)) == found


@pytest.mark.parametrize("module", modules())
def test_every_target_has_mutants_that_parse_and_tests_that_are_there(module: str) -> None:
    source = (ROOT / module).read_bytes()
    for mutant in mutants(source):
        ast.parse(mutant.applied(source))
    assert modules([module])[module]


def test_what_is_no_target_is_refused() -> None:
    assert set(modules(["deltactl/server/"])) < set(modules())
    with pytest.raises(ValueError, match="deltactl/cli/ is not among"):
        modules(["deltactl/cli/"])


def test_what_is_explained_is_there() -> None:
    """An explanation that no mutant needs any more goes."""
    for module, reasons in explained().items():
        names = {mutant.name for mutant in mutants((ROOT / module).read_bytes())}
        assert reasons.keys() <= names, module


def test_a_row_comes_back_and_needs_a_reason(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    found = mutants(b"def f():\n    if a == 'it\\'s' or b == \"x\": g(1, 1)\n")
    rows = [row_for("m.py", mutant) for mutant in found]
    table.write_text("\n".join(row.replace('why = ""', 'why = "so"') for row in rows))
    assert explained(table) == {"m.py": {mutant.name: "so" for mutant in found}}
    table.write_text("\n".join(rows))
    with pytest.raises(ValueError, match="a reason"):
        explained(table)


TOY = """
def at_least(value, low):
    if value < low:
        return low
    log("so it was")
    return value


def log(text):
    pass
"""
TESTS = """
from toy import at_least

def test_at_least():
    assert [at_least(value, 0) for value in (-1, 0, 1)] == [0, 0, 1]
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A checkout with a module, its test, and what runs it."""
    root = tmp_path / "checkout"
    (root / "tests/support").mkdir(parents=True)
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(TESTS)
    supervised = "tests/support/supervised.py"
    (root / supervised).write_text((ROOT / supervised).read_text())
    return root


def run(root: Path, scratch: Path, log: Path | None = None, seconds: float = 600) -> Fates:
    scratch.mkdir()
    asked = {"toy.py": mutants((root / "toy.py").read_bytes())}
    campaign = Campaign({"toy.py": ("test_toy.py",)}, scratch, jobs=2, log=log, root=root)
    return campaign.run(asked, seconds, lambda *_: None)


def test_a_toy_is_mutated_in_a_copy_and_what_survives_is_told(toy: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fates = run(toy, tmp_path / "one", log)["toy.py"]
    told = {(mutant.was, mutant.now): fate.what for mutant, fate in fates.items()}
    assert told == {
        ("value < low", "False"): "killed",
        ("value < low", "True"): "killed",
        ("value < low", "(value <= low)"): "survived",  # the same is returned
        ("log('so it was')", "pass"): "survived",
    }
    assert {fate.by.split(" - ")[0] for fate in fates.values() if not fate.survived} == {
        "test_toy.py::test_at_least"
    }
    assert (toy / "toy.py").read_text() == TOY
    assert not list(toy.rglob("__pycache__"))
    # What was killed is known, and what survived is tried again.
    again = run(toy, tmp_path / "two", log, seconds=0)["toy.py"]
    assert again == {mutant: fate for mutant, fate in fates.items() if not fate.survived}
    (toy / "toy.py").write_text("\n" + TOY)
    assert run(toy, tmp_path / "three", log, seconds=0)["toy.py"] == {}


def test_tests_that_fail_anyhow_or_are_none_tell_nothing(toy: Path, tmp_path: Path) -> None:
    (toy / "test_toy.py").write_text(TESTS.replace("== [0", "!= [0"))
    with pytest.raises(Useless, match="without a fault"):
        run(toy, tmp_path / "scratch")
    (toy / "test_toy.py").write_text("")
    mutant, *_ = mutants(TOY.encode())
    with pytest.raises(Useless, match="no test was run"):
        Copy(tmp_path / "copy", toy).fate("toy.py", mutant, ("test_toy.py",), 0.0)


def test_a_mutant_without_an_end_is_ended(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutation.running._LEAST", 0.0)
    mutant, *_ = mutants(TOY.encode())
    copy = tmp_path / "copy"
    fate = Copy(copy, toy).fate("toy.py", mutant, ("test_toy.py",), 0.0)
    assert (fate.what, fate.survived) == ("hung", False)
    assert (copy / "toy.py").read_text() == TOY


def test_the_status_says_whether_all_is_killed_or_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = mutants(b"def f():\n    return not a, b < c, d > e\n")
    found = {one: Fate("killed", 1), two: Fate("survived", 1)}
    everything = {"m.py": [one, two, three]}

    def status(*reasons: Mutant) -> int:
        known = {"m.py": {mutant.name: "so" for mutant in reasons}}
        return command._report(everything, everything, {"m.py": found}, known)

    assert status() == 1
    assert "no time was left for 1 mutants" in capsys.readouterr().out
    assert status(one) == 1
    assert "explained, and killed now: m.py: ('f', 'not a'" in capsys.readouterr().out
    assert status(two) == 0
    assert status(two, three) == 0
    figures = capsys.readouterr().out.splitlines()[-2].split()
    assert figures == ["all", "3", "2", "1", "1", "1"]


def test_every_pattern_has_files() -> None:
    for target, tests in TARGETS.items():
        assert all(list(ROOT.glob(pattern)) for pattern in (target, *tests))
