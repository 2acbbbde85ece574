"""Where a server listens and whom it lets in: prefix, unix socket, https, other origins, key files, slow clients."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.server.command.serve import run
from slipstream.server.http import web_page as pages
from slipstream.server.http.address import bind, is_taken
from slipstream.server.http.auth import keys_of
from slipstream.server.http.connection import LEAST_READ, Connection
from slipstream.server.http.limits import check
from tests.http.entry import load
from tests.http.fake import delta, done
from tests.http.serving import PATIENCE_S, Served, chat, logged, raw, served, until, with_loop

# --- prefix ---


def test_a_prefix_is_in_front_of_every_route() -> None:
    with served(api_prefix="/llm/a", api_key="k") as server:
        for path in ("/health", "/ready", "/live", "/", *pages.FILES):
            assert server.http.get(f"/llm/a{path}").status_code == 200, path
        key = {"x-api-key": "k"}
        assert server.post("/llm/a/v1/chat/completions", chat(), headers=key).status_code == 200
        assert server.post("/llm/a/v1/chat/completions", chat()).status_code == 401
        assert server.http.get("/llm/a/v1/models/fake%2Fmodel", headers=key).json()["id"] == "fake/model"
        for path in ("/health", "/v1/models", "/", "/llm/", "/llm/ab/health", "/llm/b/health"):
            answer = server.http.get(path, headers=key)
            assert answer.status_code == 404, path
            assert answer.json()["error"]["type"] == "not_found_error"
            assert answer.headers["x-request-id"]


def test_the_page_below_a_prefix_finds_its_parts() -> None:
    with served(api_prefix="/llm") as server:
        moved = server.http.get("/llm")
        assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")
        page = server.http.get("/llm/").text
        assert 'src="app.js"' in page
        assert 'src="/' not in page


# --- unix sockets ---


def test_a_unix_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with served(host=str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.chat().status_code == 200
        assert len(server.events()) > 3
        # Names cannot be rebound to it, so none is refused.
        assert server.http.get("/health", headers={"host": "any.example"}).status_code == 200


def test_a_socket_file_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = Settings(model="x", host=f"unix:{path}")
    bind(settings).close()
    assert path.exists()
    with bind(settings):
        with pytest.raises(SettingError, match="already in use") as caught:
            bind(settings)
        assert is_taken(caught.value)
        assert path.exists()


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.sock"
    path.write_text("precious")
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    link = tmp_path / "link.sock"
    link.symlink_to(target)
    for one in (path, link):
        with pytest.raises(SettingError, match="no socket") as caught:
            bind(Settings(model="x", host=str(one)))
        assert not is_taken(caught.value)
    assert path.read_text() == target.read_text() == "precious"
    with pytest.raises(SettingError, match="No such file"):
        bind(Settings(model="x", host=str(tmp_path / "no" / "where.sock")))


def test_a_server_on_a_unix_socket_cleans_up_and_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.sock"
    assert run(Settings(model="DYING", host=str(path)), load) == 1
    assert not path.exists()
    assert "ANYONE" not in caplog.text
    assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in capsys.readouterr().out
    with bind(Settings(model="x", host=str(path))):
        assert run(Settings(model="x", host=str(path)), load) == 4
        assert path.exists()


# --- https ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, dict[str, str]]:
    """A client's trust in the tests' own authority, and the settings of a server that it has signed for."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    key, cert = folder / "key.pem", folder / "cert.pem"
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(cert, append=True)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    return trusted, {"ssl_key_file": str(key), "ssl_cert_file": str(cert)}


def test_https(certificate: tuple[ssl.SSLContext, dict[str, str]]) -> None:
    trusted, files = certificate
    with served(trusted=trusted, **files) as server:
        assert server.url.startswith("https://")
        assert server.chat().status_code == 200
        assert len(server.events()) > 3
        plain = raw(server.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" not in plain


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handshakes_that_do_not_come(
    certificate: tuple[ssl.SSLContext, dict[str, str]], monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """In silence, drop by drop, or with nothing behind them: all is over in time, also a farewell without an answer."""
    with_loop(loop, monkeypatch)
    trusted, files = certificate
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusted.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    first = hello.read()
    with served(trusted=trusted, timeout=0.4, **files) as server:

        def lasts(sent: bytes) -> float:
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(sent)
                return closed_after(connection)

        with ThreadPoolExecutor() as at_once:
            assert all(
                0.2 < one < PATIENCE_S for one in at_once.map(lasts, (b"", first[:1], first[:200], first))
            )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            drops = iter(first[i : i + 1] for i in range(len(first)))
            assert cut_off_after(connection, drops) < PATIENCE_S
        n_before = len(os.listdir("/proc/self/fd"))
        connection = socket.create_connection(("127.0.0.1", server.port))
        with trusted.wrap_socket(connection, server_hostname="localhost"):
            until(lambda: len(os.listdir("/proc/self/fd")) == n_before + 1)  # the server's end is closed
        assert server.chat().status_code == 200


def test_wrong_certificates_end_the_start(
    certificate: tuple[ssl.SSLContext, dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, files = certificate
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("nothing")
    for wrong in (rubbish, tmp_path / "absent.pem"):
        for name in files:
            caplog.clear()
            assert run(Settings(model="x", port=0, **{**files, name: str(wrong)}), load) == 3
            (told,) = logged(caplog, "cannot_start")
            assert "--ssl-cert-file" in told["reason"]
    caplog.clear()
    plain = load_pem_private_key(Path(files["ssl_key_file"]).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    form = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    locked.write_bytes(plain.private_bytes(*form))
    assert run(Settings(model="x", port=0, **{**files, "ssl_key_file": str(locked)}), load) == 3
    (told,) = logged(caplog, "cannot_start")
    assert told["reason"].startswith(f"--ssl-key-file {locked}: the key is encrypted")
    for name, other in (("ssl_key_file", "--ssl-cert-file"), ("ssl_cert_file", "--ssl-key-file")):
        with pytest.raises(SettingError, match=f"{other} is needed too"):
            check(Settings(model="x", **{name: "one.pem"}))


# --- other origins ---


def test_named_origins_may_use_the_server() -> None:
    with served(cors_origins="https://my.example, http://localhost:3000", api_key="k") as server:
        asked = {
            "origin": "https://my.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        # A browser's preflight brings no key.
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://my.example"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        real = {"origin": "https://my.example", "x-api-key": "k"}
        answer = server.post("/v1/chat/completions", chat(), headers=real)
        assert answer.headers["access-control-allow-origin"] == "https://my.example"
        assert answer.status_code == 200
        assert (
            server.post("/v1/chat/completions", chat(), headers={"origin": "https://my.example"}).status_code
            == 401
        )


@pytest.mark.parametrize(
    "origin", ["http://my.example", "https://my.example.evil", "https://my.example:444", "null", "*"]
)
def test_other_origins_are_told_nothing(origin: str) -> None:
    with served(cors_origins="https://my.example") as server:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        answer = server.http.get("/health", headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_this_machine_may_use_the_server_where_allowed() -> None:
    local = (
        "http://localhost",
        "http://localhost:8080",
        "http://127.0.0.1:3000",
        "https://[::1]",
        "http://[::1]:1",
    )
    others = (
        "http://evil.example",
        "http://notlocalhost",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil",
        "null",
    )
    with served(cors_origins="localhost, https://my.example") as server:
        for origin in (*local, *others, "https://my.example"):
            answer = server.http.get("/health", headers={"origin": origin})
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (None if origin in others else origin), origin


@pytest.mark.parametrize(
    "name", ["*", "https://*.example", "my.example", "https://a.example/path", "file://x"]
)
def test_origins_are_exact(name: str) -> None:
    with pytest.raises(SettingError, match="nor an exact origin"):
        check(Settings(model="x", cors_origins=f"https://ok.example,{name}"))


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/", "/a b", "//a", "/a?b", "/../a%2f"])
def test_prefixes_that_cannot_be(prefix: str) -> None:
    with pytest.raises(SettingError, match="must begin with /"):
        check(Settings(model="x", api_prefix=prefix))


# --- keys in files ---


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# those of the team\n\n  gamma  \nde#lta\n#epsilon\ngamma\n")
    assert keys_of(Settings(api_key="alpha", api_key_file=str(path))) == ("alpha", "gamma", "de#lta")
    with served(api_key="alpha", api_key_file=str(path)) as server:
        for key, status in (("alpha", 200), ("gamma", 200), ("de#lta", 200), ("epsilon", 401), ("de", 401)):
            assert server.http.get("/v1/models", headers={"x-api-key": key}).status_code == status, key


def test_keys_from_a_pipe() -> None:
    """As of `--api-key-file <(pass show slipstream)`, which can be read once."""
    end, other = os.pipe()
    os.write(other, b"piped\n")
    os.close(other)
    with open(end), served(api_key_file=f"/dev/fd/{end}") as server:
        for key, status in (("piped", 200), ("", 401)):
            assert server.http.get("/v1/models", headers={"x-api-key": key}).status_code == status, key


def test_a_key_file_of_a_windows_editor(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfalpha\r\n\r\n# gamma\r\nbeta\r\n")
    assert keys_of(Settings(api_key_file=str(path))) == ("alpha", "beta")


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe", b"\xef\xbb\xbf", None])
def test_a_key_file_without_keys_opens_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match="--api-key-file"):
        keys_of(Settings(api_key_file=str(path)))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o644, True), (0o640, True)])
def test_a_key_file_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("secret-key\n")
    path.chmod(mode)
    run(Settings(model="DYING", port=0, api_key_file=str(path)), load)
    assert bool(logged(caplog, "key_file_open_to_others")) == warns
    assert "secret-key" not in caplog.text


def test_wrong_keys_slow_nobody() -> None:
    with served(api_key="right") as server:
        wrong = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: wrong-%d\r\n\r\n"
        attack = b"".join(wrong % i for i in range(1000))
        right = {"x-api-key": "right"}
        slowest = 0.0
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(attack)
            n_refused, answers = 0, b""
            while n_refused < 1000:
                started = time.monotonic()
                assert server.http.get("/v1/models", headers=right).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
                answers = answers[-20:] + connection.recv(1 << 16)
                n_refused += answers.count(b"HTTP/1.1 401 ")
        assert slowest < PATIENCE_S


# --- slow clients ---


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with served(timeout=0.4) as one:
        yield one


def closed_after(connection: socket.socket) -> float:
    """Seconds until the server closes."""
    connection.settimeout(PATIENCE_S)
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return time.monotonic() - started


def cut_off_after(connection: socket.socket, drops: Iterator[bytes]) -> float:
    """Seconds until the server closes although something is sent all the time."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - started < PATIENCE_S:
            connection.sendall(next(drops))
            time.sleep(0.05)
    return time.monotonic() - started


def test_replies_that_are_not_read_are_cut_off(impatient: Served) -> None:
    """Whole ones, asked for on one connection."""
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    n_bytes = len(impatient.http.get("/openapi.json").content)
    n_asked = -(-(16 << 20) // n_bytes)  # more than the system's buffers hold
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(asked * n_asked)
        time.sleep(1.5)
        n_read = 0
        with contextlib.suppress(ConnectionError):
            while n_read < n_asked * n_bytes and (piece := connection.recv(1 << 20)):
                n_read += len(piece)
    assert n_read < n_asked * n_bytes


def test_a_reply_that_is_read_slowly_is_not_cut_off() -> None:
    """As long as enough has been read since the last look."""
    sizes = 1 << 20, (1 << 20) - LEAST_READ, 1 << 19, (1 << 19) - LEAST_READ + 1
    one, left = object.__new__(Connection), Mock(side_effect=sizes)
    one.loop, one.transport, one.timeout_s = Mock(), Mock(get_write_buffer_size=left), 60.0
    one._wait_for_reader()
    for is_cut in (False, True):
        _, look, n_before = one.loop.call_later.call_args.args
        look(n_before)
        assert one.transport.abort.called == is_cut


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        b"GET /health HTTP/1.1\r\nhost: loc",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal",  # the next request on the connection
    ],
)
def test_headers_that_do_not_come(impatient: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(sent)
        assert 0.2 < closed_after(connection) < PATIENCE_S


def test_headers_drop_by_drop(impatient: Served) -> None:
    """Slowloris: a byte now and then does not extend the time."""
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        assert cut_off_after(connection, repeat(b"G")) < PATIENCE_S


def test_a_body_that_does_not_come(impatient: Served) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"x-should-retry: false" in answer
        assert b'"code":"body_timeout"' in answer
        assert closed_after(connection) < PATIENCE_S


def test_an_answered_request_whose_body_never_ends(impatient: Served) -> None:
    """What is left of a body is read so that it is not taken for a request, but not for ever."""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")
        assert cut_off_after(connection, repeat(b"1\r\na\r\n")) < PATIENCE_S


def test_those_in_time_are_served(impatient: Served) -> None:
    """A stream may take longer than the limit, and a connection may rest between requests."""
    impatient.engine.script = lambda request: [delta("a"), 0.6, delta("b"), 0.2, delta("c"), done(request, 3)]
    assert len(impatient.events()) == 5
    time.sleep(0.6)
    assert impatient.http.get("/health").status_code == 200


def test_a_long_body_has_more_time(impatient: Served) -> None:
    """In proportion to what has come, so that a slow but honest line gets through."""
    body = b'{"prompt": "' + b"a " * 20_000 + b'"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        for start in range(0, len(body), 8000):
            connection.sendall(body[start : start + 8000])
            time.sleep(0.15)
        assert connection.recv(4096).startswith(
            b"HTTP/1.1 400 "
        )  # read to its end, and too long for the context


def test_malformed_requests_are_told_in_openais_shape(impatient: Served) -> None:
    answer = raw(impatient.port, b"\x16\x03\x01 what is this\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b'"param":null,"code":"malformed_request"}}')


def test_connections_are_given_back() -> None:
    """Idle connections: they are closed in time and their file descriptors return."""
    with served(timeout=0.5) as server:
        assert server.http.get("/health").status_code == 200  # its loop has the files that it keeps
        n_before = len(os.listdir("/proc/self/fd"))
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        assert server.http.get("/health").status_code == 200
        assert max(closed_after(one) for one in connections) < PATIENCE_S
        for one in connections:
            one.close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= n_before + 2)
        assert httpx.get(f"{server.url}/health").status_code == 200
