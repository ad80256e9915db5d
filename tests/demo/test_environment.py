"""The environment over real sockets: many clients at once, and those that mean no good."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from deltactl.demo.game import game
from deltactl.demo.game.play import Table
from deltactl.demo.loop.environment import (
    BODY,
    CONNECTIONS,
    IDLE,
    BadRequest,
    Environment,
    Sessions,
)


def begin(environment: Environment, seed: int) -> str:
    reply = requests.post(f"{environment.url}/sessions", json={"seed": seed}, timeout=30)
    assert reply.status_code == 201
    found = reply.json()
    assert (found["letters"], found["guesses"]) == (game.LETTERS, game.GUESSES)
    return str(found["session"])


def guess(environment: Environment, session: str, word: object) -> requests.Response:
    url = f"{environment.url}/sessions/{session}/guess"
    return requests.post(url, json={"word": word}, timeout=30)


def test_a_session_from_its_begin_to_its_reward(environment: Environment) -> None:
    secret = game.secret_of(7)
    others = [word for word in game.WORDS if word != secret][:2]
    session = begin(environment, 7)
    for number, word in enumerate(others):
        assert guess(environment, session, word).json() == {
            "marks": game.marks(secret, word),
            "left": game.GUESSES - number - 1,
            "done": False,
            "reward": None,
        }
    assert guess(environment, session, secret).json() == {
        "marks": secret.upper(),
        "left": game.GUESSES - 3,
        "done": True,
        "reward": 0.75,
    }
    assert guess(environment, session, secret).status_code == 404
    assert Table(environment.url).counts() == {"open": 0, "most": 1, "begun": 1, "done": 1}


def test_a_session_ends_with_the_last_guess(environment: Environment) -> None:
    session = begin(environment, 3)
    replies = [guess(environment, session, "zzz").json() for _ in range(game.GUESSES)]
    assert [reply["done"] for reply in replies] == [False] * (game.GUESSES - 1) + [True]
    assert [reply["left"] for reply in replies] == [3, 2, 1, 0]
    assert replies[-1]["reward"] == 0
    assert {reply["marks"] for reply in replies} == {"!!!"}


def test_many_clients_at_once_each_get_their_own_game(environment: Environment) -> None:
    table, clients = Table(environment.url), 64
    met = threading.Barrier(2, timeout=60)

    def meet(seed: int) -> tuple[list[str], float]:
        return play(seed, met.wait if seed < 2 else None)

    def play(seed: int, begun: Callable[[], Any] | None = None) -> tuple[list[str], float]:
        secret, session = game.secret_of(seed), table.begin(seed)
        if begun:
            begun()
        words = [*game.WORDS[seed % 40 : seed % 40 + 3], secret]
        said: list[str] = []
        for word in words:
            marks, reward = table.guess(session, word)
            assert marks == game.marks(secret, word)
            said.append(marks)
            if reward is not None:
                return said, reward
        raise AssertionError("no end")

    with ThreadPoolExecutor(clients) as pool:
        once = list(pool.map(meet, range(400)))
    assert once == [play(seed) for seed in range(400)]
    counts = table.counts()
    assert counts["open"] == 0
    assert counts["begun"] == counts["done"] == 800
    assert counts["most"] > 1


def test_sessions_interleave_without_a_word_between_them(environment: Environment) -> None:
    table = Table(environment.url)
    sessions = [(game.secret_of(seed), table.begin(seed)) for seed in range(300)]
    for word in ("zzz", *game.WORDS[:2]):
        for secret, session in sessions:
            if secret not in game.WORDS[:2]:
                assert table.guess(session, word)[0] == game.marks(secret, word)
    assert table.counts()["most"] == 300


def test_sessions_are_bounded_and_the_one_idle_longest_goes() -> None:
    sessions = Sessions(limit=3)
    names = [sessions.begin({"seed": seed})["session"] for seed in range(3)]
    sessions.guess(names[0], {"word": "zzz"})  # names[1] is idle longest now
    sessions.begin({"seed": 9})
    with pytest.raises(BadRequest) as refused:
        sessions.guess(names[1], {"word": "zzz"})
    assert refused.value.status == 404
    assert sessions.guess(names[0], {"word": "zzz"})["left"] == game.GUESSES - 2
    assert sessions.counts() == {"open": 3, "most": 3, "begun": 4, "done": 0}


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"word"', 400),
    (b"{}", 400),
    (b'{"seed": null}', 400),
    (b'{"seed": true}', 400),
    (b'{"seed": 1.0}', 400),
    (b'{"seed": "1"}', 400),
    (b'{"seed": -1}', 400),
    (b'{"seed": NaN}', 400),
    (b'{"seed": 9223372036854775808}', 400),
    (b'{"seed": ' + b"9" * (BODY - 20) + b"}", 400),
    (b"[" * (BODY - 1), 400),
    (b"\xff\xfe{}", 400),
    (b'{"seed": 1}' + b" " * BODY, 413),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[repr(b[:30]) for b, _ in BODIES])
def test_a_body_that_makes_no_sense_is_refused(
    environment: Environment, body: bytes, status: int
) -> None:
    reply = requests.post(f"{environment.url}/sessions", data=body, timeout=30)
    assert reply.status_code == status
    assert list(reply.json()) == ["error"]
    assert Table(environment.url).counts()["begun"] == 0


WORDS: list[Any] = [None, 1, True, ["bat"], {"a": 1}, 1.5]


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_guess_that_is_no_text_costs_nothing(environment: Environment, word: Any) -> None:
    session = begin(environment, 1)
    assert guess(environment, session, word).status_code == 400
    assert guess(environment, session, "zzz").json()["left"] == game.GUESSES - 1


@pytest.mark.parametrize(
    "word", ["", "b\0t", "\uff22\uff21\uff34", "🦇🦇🦇", "ba", "b" * 500, "\ud800at"]
)
def test_a_guess_that_is_no_word_is_answered_by_refusing_marks(
    environment: Environment, word: str
) -> None:
    session = begin(environment, 1)
    body = json.dumps({"word": word})
    url = f"{environment.url}/sessions/{session}/guess"
    reply = requests.post(url, data=body, timeout=30)
    assert (reply.status_code, reply.json()["marks"]) == (200, "!!!")


def test_paths_and_methods_that_are_not_there(environment: Environment) -> None:
    url, body = environment.url, {"word": "bat", "seed": 1}
    for path in ("/session", "/sessions/", "/sessions//", "/sessions/x/guess"):
        assert requests.post(url + path, json=body, timeout=30).status_code == 404
    name = "0" * 16
    assert requests.post(f"{url}/sessions/{name}/guess", json=body, timeout=30).status_code == 404
    assert requests.get(url + "/sessions", timeout=30).status_code == 404
    assert requests.delete(url + "/sessions", timeout=30).status_code == 501
    assert Table(url).counts()["begun"] == 0


def exchange(environment: Environment, raw: bytes, *, end: bool = False) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(environment.server_address[:2], timeout=30) as client:
        client.sendall(raw)
        if end:
            client.shutdown(socket.SHUT_WR)
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
        return found


HEAD = b"POST /sessions HTTP/1.1\r\nHost: x\r\n"
RAW: dict[str, tuple[bytes, bytes]] = {
    "no length": (HEAD + b"\r\n", b"HTTP/1.1 411"),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"HTTP/1.1 411"),
    "chunked": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"HTTP/1.1 411"),
    "negative": (HEAD + b"Content-Length: -1\r\n\r\n", b"HTTP/1.1 413"),
    "hexadecimal": (HEAD + b"Content-Length: 0x2\r\n\r\n{}", b"HTTP/1.1 413"),
    "huge": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", b"HTTP/1.1 413"),
    "too long": (HEAD + b"Content-Length: 1025\r\n\r\n", b"HTTP/1.1 413"),
    "a request in a body": (
        b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\nGET / ...",
        b"HTTP/1.1 200",
    ),
    "a long line": (b"GET /" + b"a" * 70000, b"HTTP/1.1 414"),
    "many headers": (HEAD + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.1 431"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b""),
}


@pytest.mark.parametrize("name", RAW)
def test_what_no_client_sends_ends_the_connection_and_no_more(
    environment: Environment, name: str
) -> None:
    raw, answer = RAW[name]
    found = exchange(environment, raw)
    assert found.startswith(answer)
    assert found.count(b"HTTP/1.1 ") <= 1
    assert len(begin(environment, 1)) == 16


def test_a_client_that_breaks_off_in_its_body_began_nothing(environment: Environment) -> None:
    raw = HEAD + b'Content-Length: 11\r\n\r\n{"seed"'
    assert exchange(environment, raw, end=True).startswith(b"HTTP/1.1 400")
    assert Table(environment.url).counts()["begun"] == 0


@pytest.mark.parametrize("raw", [b"", b"POST /sess", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_a_client_that_goes_silent_is_put_out(environment: Environment, raw: bytes) -> None:
    environment.idle = 0.5
    with contextlib.suppress(ConnectionError):  # it was put out before it had sent anything
        assert exchange(environment, raw) == b""
    environment.idle = IDLE
    assert len(begin(environment, 1)) == 16


class Places(threading.BoundedSemaphore):
    """Tells when one has to be waited for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.waited_for = threading.Event()

    def acquire(self, *args: Any, **options: Any) -> bool:
        if super().acquire(blocking=False):
            return True
        self.waited_for.set()
        return super().acquire(*args, **options)


def test_clients_past_the_most_wait_until_one_has_gone(environment: Environment) -> None:
    environment._places = places = Places(CONNECTIONS)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as silent:
        for _ in range(CONNECTIONS):
            address = environment.server_address[:2]
            silent.enter_context(socket.create_connection(address, timeout=30))
        late = pool.submit(begin, environment, 1)
        assert places.waited_for.wait(60)
        assert environment.sessions.counts()["begun"] == 0
        silent.close()
        assert len(late.result()) == 16
