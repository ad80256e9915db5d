"""A password in an address is refused by every verb, wherever it stands, and never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltactl.bucket import open_bucket
from deltactl.chain.store import refuse_secret
from deltactl.core.errors import UsageError
from tests.cli.conftest import Checkpoints, Cli, Ran
from tests.cli.test_help import VERBS

SECRET = "hunter2Zq"
SCHEMES = ("s3", "gs", "az", "hf", "file", "http", "gopher")
URLS = [f"{scheme}://user:{SECRET}@host/chain" for scheme in SCHEMES]
URLS += [
    f"s3://AKIA:a/{SECRET}@bucket",
    f"s3://:{SECRET}@bucket",
    f"s3://user:x@{SECRET}@bucket/chain",
    f"s3://user:{SECRET}@bucket/chain@11",
    f"s3://user:{SECRET}@bucket/chain.safetensors",
]
FLAGS = [(), ("--json",), ("-q",)]


def assert_refused(ran: Ran, words: object) -> None:
    assert ran.code == 2, words
    assert SECRET not in ran.stdout + ran.stderr, words
    assert "password" in ran.stderr, words


@pytest.mark.parametrize("url", URLS)
def test_open_bucket_refuses_it(url: str) -> None:
    with pytest.raises(UsageError, match="password") as caught:
        open_bucket(url)
    assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.facts()}"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flags", FLAGS)
def test_every_verb_refuses_it_anywhere(
    verb: str, flags: tuple[str, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = URLS[0]
    lines = [(url, *rest) for url in URLS for rest in ((), (url,))]
    lines += [("a", url), ("a", url, "c"), (url, url, url), ("a", f"--step={url}")]
    lines += [
        ("a", "b", option, url)
        for parameter in VERBS[verb].params
        if parameter.param_type_name == "option"
        for option in (*parameter.opts, "--no-such-option")
    ]
    for words in lines:
        ran = cli(verb, *words, *flags)
        assert_refused(ran, words)
        if flags == ("--json",):
            assert ran.json["error"]["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", FLAGS)
def test_without_a_verb_or_with_an_unknown_one(cli: Cli, flags: tuple[str, ...]) -> None:
    for words in (URLS[:1], ("loog", URLS[0]), ("--version", URLS[0]), ("--help", URLS[0])):
        assert_refused(cli(*words, *flags), words)


@pytest.mark.parametrize(
    "url", ["s3://host:9000/chain", "s3://user@bucket/chain", "s3://bucket/a:b", "s3://host:9000/x"]
)
def test_what_is_no_password(url: str) -> None:
    """A port, a name, a colon further on, and a step."""
    refuse_secret(url)
    refuse_secret(f"{url}@11")


def test_a_name_with_a_colon_and_an_at_is_a_name(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("push", checkpoints.base, "a:b@c").code == 0
    assert cli("log", "a:b@c").code == 0
