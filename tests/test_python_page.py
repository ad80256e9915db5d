"""man/deltactl-python.3 against the code: its names and signatures, and its examples, which run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import deltactl
from deltactl.core.errors import DeltactlError
from tests.support.checkpoints import changed, random_tensor, write_hf_directory
from tests.support.tools import need

PAGE = Path(__file__).parents[1] / "man/deltactl-python.3"
FUNCTIONS = [name for name in deltactl.__all__ if name[0].islower()]


def blocks(section: str) -> list[str]:
    """The displayed text of a section, without roff's escapes."""
    text = PAGE.read_text().split(f"\n.SH {section}\n")[1].split("\n.SH ")[0]
    found = re.findall(r"\n?\.nf\n(.*?)\n\.fi", text, re.DOTALL)
    return [code.replace("\\-", "-").replace("\\e", "\\").replace("\\&", "") for code in found]


def signature(name: str) -> str:
    """As the page writes it: without types, and silence by its name."""
    found = inspect.signature(getattr(deltactl, name))
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return f"deltactl.{name}{re.sub(r'<function silent at [^>]*>', 'silent', text)}"


def test_the_synopsis_has_every_name_with_its_signature() -> None:
    (synopsis,) = blocks("SYNOPSIS")
    shown = re.sub(r"\n +", " ", synopsis).split("\n\n")[1].split("\n")
    others = [f"deltactl.{name}" for name in deltactl.__all__ if name not in FUNCTIONS]
    assert sorted(shown) == sorted([*map(signature, FUNCTIONS), *others])


def test_every_name_is_described() -> None:
    entries = re.findall(r"\n\.TP\n\.B (\w+)\n", PAGE.read_text())
    assert sorted(entries) == sorted(deltactl.__all__)
    for name in FUNCTIONS:
        assert inspect.getdoc(getattr(deltactl, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_can_be_asked_for(name: str) -> None:
    assert get_type_hints(getattr(deltactl, name))["return"].__module__.startswith("deltactl.")


def test_the_errors_named_are_there() -> None:
    named = PAGE.read_text().split(".BR deltactl.core.errors :\n")[1].split("\n.SH")[0]
    for name in re.findall(r"\b[A-Z]\w+(?=[ ,.])", named):
        assert issubclass(getattr(sys.modules["deltactl.core.errors"], name), DeltactlError)


def test_the_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {"a": random_tensor("BF16", (300,), seed=1), "b": random_tensor("F32", (9,), seed=2)}
    after = before | {"a": changed(before["a"], 0.1, seed=3)}
    write_hf_directory(tmp_path / "step_10", before)
    write_hf_directory(tmp_path / "step_11", after)
    for code in blocks("EXAMPLES"):
        exec(code, {})
    printed = capsys.readouterr().out
    assert re.match(r"\d+ of 309 elements\na \d+\n10 anchor \d+\n11 delta \d+\n", printed)
    assert "a (300,) 300\n" in printed
    assert "no such step" in printed.splitlines()[-1]


def test_a_delta_and_a_chain_are_told_apart(tmp_path: Path) -> None:
    tensors = {"a": random_tensor("BF16", (300,), seed=1)}
    write_hf_directory(tmp_path / "old", tensors)
    write_hf_directory(tmp_path / "new", {"a": changed(tensors["a"], 0.1, seed=2)})
    deltactl.diff(tmp_path / "old", str(tmp_path / "new"), tmp_path / "d.safetensors")
    deltactl.push(tmp_path / "old", tmp_path / "chain")
    deltactl.push(tmp_path / "new", tmp_path / "chain", base=tmp_path / "old")
    assert deltactl.verify(tmp_path / "d.safetensors").links == 1
    found = deltactl.verify(tmp_path / "chain", against=tmp_path / "new")
    assert (found.ok, found.links) == (True, 2)
    assert not deltactl.verify(tmp_path / "chain", against=tmp_path / "old").ok
    applied = deltactl.apply(tmp_path / "d.safetensors", tmp_path / "old")
    assert applied.written and applied.out == tmp_path / "old"


def test_names_that_are_none_are_refused_and_all_are_listed() -> None:
    assert set(deltactl.__all__) <= set(dir(deltactl))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        deltactl.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "brings"), [("diff", {"numpy"}), ("DeltactlError", set()), ("Publisher", {"torch"})]
)
def test_a_name_brings_what_it_needs_and_no_more(name: str, brings: set[str]) -> None:
    heavy = {"botocore", "huggingface_hub", "numpy", "obstore", "rich", "torch", "typer"}
    program = f"import sys, deltactl; deltactl.{name}; print(*({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    found = set(done.stdout.split())
    assert found >= brings, done.stderr
    assert not found & {"rich", "typer", "botocore", "obstore", "huggingface_hub"}
    assert "torch" in brings or "torch" not in found


def test_the_page_has_no_fault() -> None:
    done = subprocess.run([need("mandoc"), "-T", "lint", PAGE], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
