"""Who may ask and what they learn: keys, host names, request ids, status, the page."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest

from slipstream.server.http import web_page as pages
from tests.http.document import held
from tests.http.fake import INFO, FakeEngine, delta, done
from tests.http.serving import Served, chat, raw, served, until


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(api_key="alpha, beta") as one:
        yield one


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer alpha"},
        {"authorization": "bearer beta"},
        {"authorization": "alpha"},
        {"x-api-key": "beta"},
        {"x-api-key": "Bearer beta"},
    ],
)
def test_right_keys(locked: Served, headers: dict[str, str]) -> None:
    assert locked.post("/v1/chat/completions", chat(), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer alph"},
        {"authorization": "Bearer alpha, beta"},
        {"authorization": "Basic alpha"},
        {"x-api-key": "gamma"},
        {"x-api-key": ""},
        {"authorization": "Bearer ÿ"},
    ],
)
def test_wrong_keys(locked: Served, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/slots"),
        ("GET", "/speculation"),
        ("GET", "/props"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/nothing"),
    ):
        answer = locked.http.request(method, path, headers=encoded)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/health", "/v1/health", "/ping", "/live", "/", "/app.js", "/style.css", "/LICENSES.txt"]
)
def test_public_paths(locked: Served, path: str) -> None:
    assert locked.http.get(path).status_code == 200
    assert locked.http.head(path).status_code == 200


def test_keys_may_have_any_characters() -> None:
    """Clients send UTF-8; browsers and some libraries Latin-1 where it has the characters."""
    with served(api_key="clé, шà, \udcff\udcfe") as server:
        for key in ("clé".encode(), "clé".encode("latin-1"), "шà".encode(), b"\xff\xfe"):
            for headers in ({"authorization": b"Bearer " + key}, {"x-api-key": key}):
                assert server.http.get("/props", headers=headers).status_code == 200
        for key in (b"cle", "клé".encode(), "шà".encode()[:-1], b"\xff", b"?\xc3\xa0", b"cl?"):
            assert server.http.get("/props", headers={"x-api-key": key}).status_code == 401


def test_every_key_is_compared(locked: Served) -> None:
    with mock.patch("hmac.compare_digest", wraps=hmac.compare_digest) as compared:
        locked.http.get("/props", headers={"x-api-key": "alpha"})
    assert compared.call_count == 2


def test_keys_are_tenants_of_their_own(locked: Served) -> None:
    locked.engine.requests.clear()
    for key in ("alpha", "beta", "alpha"):
        locked.post("/v1/chat/completions", chat(), headers={"x-api-key": key})
    first, second, third = (request.tenant for request in locked.engine.requests)
    assert first == third != second
    assert first
    assert "alpha" not in first


def test_a_salt_makes_no_key_of_its_own(locked: Served) -> None:
    """Or a caller would have a turn for each salt it thinks of."""
    locked.engine.requests.clear()
    for key, fields in (
        ("alpha", {}),
        ("alpha", {"cache_salt": "s"}),
        ("alpha", {"cache_prompt": False}),
        ("beta", {}),
    ):
        locked.post("/v1/chat/completions", chat(**fields), headers={"x-api-key": key})
    requests = locked.engine.requests
    assert [one.owner == requests[0].owner for one in requests] == [True, True, True, False]
    assert len({one.tenant for one in requests}) == 4


def test_props_keep_the_secret(locked: Served) -> None:
    props = locked.http.get("/props", headers={"x-api-key": "alpha"})
    assert "alpha" not in props.text
    assert props.json()["settings"]["parallel"] == 4


def test_props_show_paths_that_are_no_text() -> None:
    with served(slot_save_path="/a\udcff", log_file="b") as one:
        settings = one.http.get("/props").json()["settings"]
    assert (settings["slot_save_path"], settings["log_file"]) == ("/a\ufffd", "b")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8080", 200),
        ("LOCALHOST:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:8080", 403),
        ("[::1].evil.example", 403),
        ("", 403),
        ("192.168.0.1", 403),
    ],
)
def test_host_names_on_loopback(server: Served, host: str, status: int) -> None:
    answer = raw(server.port, f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status}".encode())


def test_any_host_name_elsewhere() -> None:
    with served(host="0.0.0.0") as server:
        assert server.http.get("/health", headers={"host": "my.example"}).status_code == 200


def test_nothing_for_other_origins(server: Served) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = server.http.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("offered", "kept"),
    [("a-b_c.9", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("a\x01", False), ("", False)],
)
def test_request_ids(server: Served, offered: str, kept: bool) -> None:
    ids = [
        server.http.get(path, headers={"x-request-id": offered}).headers["x-request-id"]
        for path in ("/health", "/nothing")
    ]
    assert (ids == [offered] * 2) == kept
    assert len(set(ids)) == (1 if kept else 2)


def test_while_loading() -> None:
    with served(loaded=False) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.json()["error"]["code"] == "loading"
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/").status_code == 200
        for answer in (
            server.chat(),
            *(server.http.get(path) for path in ("/v1/models", "/slots", "/metrics")),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["type"] == "unavailable_error"
        server.gate.engine = FakeEngine()
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.chat().status_code == 200


def test_while_draining(server: Served) -> None:
    server.engine.status = "draining"
    assert (server.http.get("/health").status_code, server.http.get("/health").json()["status"]) == (
        503,
        "draining",
    )
    answer = server.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert server.http.get("/slots").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get("/live").status_code == 200


def test_after_a_failure(server: Served) -> None:
    server.engine.status = "failed"
    assert (server.http.get("/health").status_code, server.http.get("/health").json()["status"]) == (
        503,
        "failed",
    )
    assert server.http.get("/live").status_code == 503
    assert (server.chat().status_code, server.chat().headers["x-should-retry"]) == (500, "false")


def test_slots(server: Served) -> None:
    server.engine.script = lambda request: [delta("x"), 5.0, done(request, 1)]
    assert [slot["is_processing"] for slot in server.http.get("/slots").json()] == [False] * 4
    with server.http.stream("POST", "/v1/chat/completions", json=chat(stream=True, n=4)) as answer:
        lines = answer.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        slots = server.http.get("/slots").json()
        assert all(slot["is_processing"] and slot["id_task"].startswith("chatcmpl-") for slot in slots)
        assert slots[0]["next_token"] == [{"has_next_token": True, "n_remain": -1, "n_decoded": 2}]
        assert (slots[0]["n_prompt_tokens"], slots[0]["n_prompt_tokens_cache"]) == (5, 1)
        assert list(slots[0]["drafters"]) == ["ngram-simple"]
        assert slots[0]["drafters"]["ngram-simple"]["draft_n"] == 4
        assert [slot["recent"] for slot in slots] == [[[0, 0], [4, 3]]] * 4
        assert [(slot["n_max"], slot["drafter"]) for slot in slots] == [(4, "ngram-simple")] * 4
        assert [slot["step_ms"] for slot in slots] == [{"forward": 1.5, "keep": 0.125}] * 4
        none = server.http.get("/slots?fail_on_no_slot=1")
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_idle_slot")
    until(lambda: not server.engine.running)
    idle = server.http.get("/slots").json()
    shown = [(slot["drafters"], slot["n_max"], slot["drafter"], slot["recent"]) for slot in idle]
    assert shown == [({}, 0, None, [])] * 4
    assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_slots_of_other_keys_are_busy_and_no_more() -> None:
    """A key sees its own requests' figures, salted or not; of others' nothing that tells one request from another."""
    with served(api_key="alpha, beta") as server:
        server.engine.script = lambda request: [delta("x"), 5.0, done(request, 1)]
        with ExitStack() as open_ones:
            read = []  # dropping an iterator would close its connection
            for key, salt in (("alpha", None), ("alpha", "salt"), ("beta", None)):
                headers = {"x-api-key": key}
                body = chat(stream=True, cache_salt=salt)
                answer = server.http.stream("POST", "/v1/chat/completions", json=body, headers=headers)
                read.append(open_ones.enter_context(answer).iter_bytes())
                next(read[-1])
            shown = {
                key: held(server.http.get("/slots", headers={"x-api-key": key})).json()
                for key in ("alpha", "beta")
            }
    for key, n_own in (("alpha", 2), ("beta", 1)):
        assert sum(slot["is_processing"] for slot in shown[key]) == 3
        own = [slot for slot in shown[key] if slot["id_task"]]
        assert len(own) == n_own
        assert all((slot["n_prompt_tokens"], slot["n_past"]) == (5, 7) and slot["drafters"] for slot in own)
        assert all(slot["recent"] and slot["drafter"] and slot["n_max"] for slot in own)
        others = [slot for slot in shown[key] if slot["is_processing"] and slot not in own]
        idle = next(slot for slot in shown[key] if not slot["is_processing"])
        for slot in others:
            assert slot["next_token"] == [{"has_next_token": True, "n_remain": -1, "n_decoded": 0}]
            busy = {"id": slot["id"], "is_processing": True, "next_token": slot["next_token"]}
            assert slot == idle | busy


def test_props(server: Served) -> None:
    props = server.http.get("/props").json()
    assert (props["total_slots"], props["model_alias"], props["bos_token"]) == (4, "fake/model", "<s>")
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["speculation"]["drafters"] == ["prediction", "draft-model", "ngram-simple"]
    assert props["speculation"]["n_max"] == 16
    assert props["speculation"]["counts"]["ngram-simple"]["draft_n_accepted"] == 5
    assert props["engine"]["n_pages_free"] == 60
    assert (props["endpoint_slots"], props["endpoint_metrics"], props["endpoint_props"]) == (
        True,
        True,
        False,
    )
    assert not {"api_key", "otlp_endpoint"} & set(props["settings"]), "they may hold credentials"
    assert props["default_generation_settings"]["params"] == {"temperature": 1.0, "n_predict": -1}
    assert "chat_template_tool_use" not in props
    # Tools go into a system message where the template has no place for them.
    assert props["chat_template_caps"] == {
        "supports_tools": True,
        "supports_tool_calls": True,
        "supports_reasoning_effort": False,
    }
    template = '{% for one in tools %}<tool_call>"arguments{% endfor %}{{ reasoning_effort }}'
    server.engine.info = replace(server.engine.info, tool_template=template)
    props = server.http.get("/props").json()
    assert props["chat_template_tool_use"] == template
    assert all(props["chat_template_caps"].values())


def test_the_model_is_listed_as_clients_of_other_servers_read_it() -> None:
    with served(alias="first, second", n_predict=7) as one:
        one.engine.info = replace(
            one.engine.info, name="first", n_embd=64, chat_template='{{ tools }}<tool_call>"arguments'
        )
        listed = one.http.get("/v1/models").json()
        assert listed == one.http.get("/models").json()
        (entry,), (other,) = listed["data"], listed["models"]
        assert (entry["id"], entry["aliases"], entry["tags"]) == ("first", ["first", "second"], [])
        assert (entry["meta"]["n_embd"], entry["max_model_len"]) == (64, 512)
        assert (other["name"], other["capabilities"]) == ("first", ["completion", "tools"])
        assert other["modified_at"] == entry["created_at"] == "2023-11-14T22:13:20+00:00"
        assert (entry["type"], entry["display_name"]) == ("model", "first")
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "first", "first")
        assert [one.http.get(f"/v1/models/{name}").status_code for name in ("first", "second", "x")] == [
            *(200, 200, 404)
        ]
        assert one.http.get("/props").json()["default_generation_settings"]["params"]["n_predict"] == 7


def test_there_are_no_adapters_to_list_or_scale(server: Served) -> None:
    assert server.http.get("/lora-adapters").json() == []
    assert server.post("/lora-adapters", []).json() == {"success": True}
    for body, param, code in (
        ([{"id": 0, "scale": 1.0}], "lora", "unsupported_value"),
        ({}, None, "invalid_json"),
        ("x", None, "invalid_json"),
        ([{"id": 0, "id ": 1}, 5], "lora", "unsupported_value"),
    ):
        answer = server.post("/lora-adapters", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    twice = server.http.post(
        "/lora-adapters", content=b'[{"id": 0, "id": 0}]', headers={"content-type": "application/json"}
    )
    assert "given twice" in twice.json()["error"]["message"]


def test_a_server_without_its_page() -> None:
    with served(webui=False) as one:
        assert one.http.get("/").status_code == 404
        assert one.http.get("/health").status_code == 200


def test_tokens(server: Served) -> None:
    assert server.post("/tokenize", {"content": "ab"}).json() == {"tokens": [97, 98]}
    assert server.post("/tokenize", {"content": "a", "add_special": True}).json() == {"tokens": [1, 97]}
    assert server.post("/tokenize", {}).json() == {"tokens": []}
    assert server.post("/tokenize", {"content": "a", "with_pieces": True}).json() == {
        "tokens": [{"id": 97, "piece": "a"}]
    }
    for special, ids in ((None, [1, 97]), (True, [1, 97]), (False, [97])):
        fields = {"prompt": "a", "model": "m", "add_special_tokens": special}
        answer = {"tokens": ids, "count": len(ids), "max_model_len": 512}
        assert server.post("/tokenize", fields).json() == answer
    assert server.post("/detokenize", {"tokens": [97, 98]}).json() == {"content": "ab", "prompt": "ab"}
    assert server.http.get("/tokenizer_info").json() == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": INFO.chat_template,
        "max_model_len": INFO.n_ctx,
    }
    for path, body in (
        ("/tokenize", {"content": 1}),
        ("/tokenize", {"prompt": 1}),
        ("/tokenize", {"content": "a", "add_special": 1}),
        ("/tokenize", {"content": "a" * 16385, "with_pieces": True}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [True]}),
    ):
        assert server.post(path, body).status_code == 400, body


def test_apply_template(server: Served) -> None:
    assert server.post("/apply-template", chat()).json() == {"prompt": "<user>Hi there<assistant>"}
    assert server.post("/apply-template", chat(add_generation_prompt=False)).json() == {
        "prompt": "<user>Hi there"
    }
    assert server.post("/apply-template", {}).status_code == 400


def test_the_page(server: Served) -> None:
    for path, (name, kind) in pages.FILES.items():
        answer = server.http.get(path)
        assert answer.headers["content-type"].startswith(kind), name
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.text == (pages.FOLDER / name).read_text()


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip, br", True), ("br;q=1, GZIP;q=0.5", True), ("gzip;q=0", False), ("br", False), ("", False)],
)
def test_the_page_comes_packed_to_those_who_take_that(
    server: Served, accepted: str, *, is_packed: bool
) -> None:
    for path, (name, _) in pages.FILES.items():
        answer = server.http.get(path, headers={"accept-encoding": accepted})
        assert ("content-encoding" in answer.headers) == is_packed
        assert answer.headers["vary"] == "accept-encoding"
        assert answer.content == (pages.FOLDER / name).read_bytes()


def test_the_page_is_small(server: Served) -> None:
    """On its way, that is: packed."""
    sizes = [
        int(server.http.head(path, headers={"accept-encoding": "gzip"}).headers["content-length"])
        for path in pages.FILES
    ]
    assert sum(sizes) <= 200_000


def test_a_drafter_in_trouble_shows_in_health() -> None:
    with served() as server:
        sound = server.engine.stats()
        server.engine.stats = lambda: replace(  # type: ignore[method-assign]
            sound, disabled_drafters=("suffix",), doubtful_drafters=("draft-eagle3",)
        )
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert [one.split()[0] for one in health.json()["warnings"]] == ["suffix", "draft-eagle3"]


def test_an_operator_that_failed_its_self_check_shows_in_health_and_props() -> None:
    sentence = (
        "gated runs as reference in bfloat16, not as cpu: it failed its self-check (other bits at width 3)"
    )
    with served() as server:
        server.engine.info = replace(server.engine.info, replaced_operators=(sentence,))
        assert server.http.get("/health").json()["warnings"] == [f"operator {sentence}"]
        assert server.http.get("/props").json()["model"]["replaced_operators"] == [sentence]


def test_sums_over_ranks_that_failed_their_proof_show_in_health_and_props() -> None:
    why = "torch.float32: result 0 has other bits in 3 rows from row 0 than among all"
    with served() as server:
        server.engine.info = replace(server.engine.info, inexact_sums=why)
        assert server.http.get("/health").json()["warnings"] == [f"sums over ranks: {why}"]
        assert server.http.get("/props").json()["model"]["inexact_sums"] == why


# --- targets in absolute form: `GET http://host/path`, as sent to a proxy (RFC 9112, 3.2.2) ---


def asked(server: Served, target: str, *headers: str, version: str = "1.1") -> int:
    """The status of a GET of this target, as it stands in the request's line."""
    lines = [f"GET {target} HTTP/{version}", *headers, "connection: close"]
    answer = raw(server.port, ("\r\n".join(lines) + "\r\n\r\n").encode())
    return int(answer.split(b" ")[1])


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/health", 200),
        ("http://127.0.0.1:8080/health", 200),
        ("HTTP://LOCALHOST:/health?x=http://a/b", 200),
        ("https://[::1]:1/health", 200),  # as of a gateway that speaks TLS to the client
        ("http://localhost/%68ealth", 200),
        ("http://localhost/v1/models/fake%2Fmodel", 200),
        ("http://localhost", 200),  # the page
        ("http://localhost?x", 200),
        ("http://localhost//health", 404),
        ("http://localhost/http://localhost/health", 404),
        ("/http://localhost/health", 404),
        ("ftp://localhost/health", 404),
        ("http%3A//localhost/health", 404),
        ("http:///health", 400),
        ("http:/health", 400),
        ("http:health", 400),
        ("http://:80/health", 400),
        ("http://me@localhost/health", 400),
        ("http://localhost@evil.example/health", 400),
        ("http://localhost\\@evil.example/health", 400),
        ("http://localhost/health#part", 400),
        ("http://local[host/health", 400),
        ("http://localhost:80:90/health", 400),
    ],
)
def test_targets_in_absolute_form(server: Served, target: str, status: int) -> None:
    assert asked(server, target, "host: localhost") == status


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/health", "localhost", 403),
        ("http://localhost.evil.example/health", "localhost", 403),
        ("http://%6cocalhost/health", "localhost", 403),
        ("http://localhost/health", "evil.example", 200),  # the target's host is the one that counts
    ],
)
def test_the_targets_host_replaces_the_header(server: Served, target: str, host: str, status: int) -> None:
    assert asked(server, target, f"host: {host}") == status


def test_a_targets_host_counts_without_the_header(server: Served) -> None:
    """HTTP/1.0 may leave the header out; HTTP/1.1 may not, even so."""
    assert asked(server, "http://evil.example/health", version="1.0") == 403
    assert asked(server, "http://localhost/health", version="1.0") == 200
    assert asked(server, "http://localhost/health") == 400
    assert asked(server, "http://localhost/health", "host: localhost", "host: localhost") == 400


def test_absolute_targets_need_a_key_and_the_prefix() -> None:
    with served(api_key="k", api_prefix="/llm") as server:
        for target, status in (
            ("/llm/health", 200),
            ("/llm/props", 401),
            ("/llm/%70rops", 401),
            ("/llm/health/../props", 401),
            ("/llm", 308),
            ("/health", 404),
            ("/props", 404),
            ("//llm/health", 404),
            ("/http://localhost/llm/health", 404),
        ):
            assert asked(server, f"http://localhost{target}", "host: localhost") == status, target
        key = ("host: localhost", "x-api-key: k")
        assert asked(server, "http://localhost/llm/props", *key) == 200
        assert asked(server, "http://localhost/llm/props?path=/llm/health", "host: localhost") == 401


def test_a_body_behind_an_absolute_target(server: Served) -> None:
    body = b'{"content": "ab"}'
    head = (
        b"POST http://localhost/tokenize HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        b"content-type: application/json\r\n"
    )
    answer = raw(server.port, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.endswith(b'{"tokens":[97,98]}')
    chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert raw(server.port, head + chunks).endswith(b'{"tokens":[97,98]}')
