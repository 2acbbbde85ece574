"""A library written in Rust that panics, which Python sees as no `Exception`: the request's fault stays its own.

The tokenizer is the demo's with an expression that runs wild on many `#`, in texts and in a token; both really panic.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process import ROOT, Running, forked
from tests.service.asking import body

WILD = {"Regex": "(?:#|#)+(?!.|$)"}
TEXT = "#" * 40


@pytest.fixture(scope="module")
def wild_token() -> int:
    """A token of the demo's that is nothing but `#`."""
    made = json.loads((ROOT / "demo" / "target" / "tokenizer.json").read_text())
    return int(made["model"]["vocab"]["#" * 32])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("panics")
    for file in (ROOT / "demo" / "target").iterdir():
        (folder / file.name).symlink_to(file)
    made = json.loads((folder / "tokenizer.json").read_text())
    splits = made["pre_tokenizer"]["pretokenizers"]
    splits.insert(0, {"type": "Split", "pattern": WILD, "behavior": "Isolated", "invert": False})
    replace = {"type": "Replace", "pattern": WILD, "content": ""}
    made["decoder"] = {"type": "Sequence", "decoders": [replace, made["decoder"]]}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(made))
    arguments = ("-m", str(folder), "--threads", "1", "--ctx-size", "512", "--log-format", "json")
    with forked(folder / "log", arguments, environ={"RUST_BACKTRACE": "0"}) as one:
        yield one


def errors_of(server: Running, request_id: str) -> list[dict[str, Any]]:
    """The errors in the log that name a request."""
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    events = [json.loads(line) for line in lines if request_id in line]
    return [one for one in events if one["level"] == "error"]


CALLS = {
    "a text to tokenize": ("/tokenize", {"content": TEXT}),
    "tokens to make a text of": ("/detokenize", {}),
    "a prompt": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "a prompt of a stream": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "stream": True}),
    "a message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "a prediction": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "prediction": {"type": "content", "content": TEXT},
        },
    ),
    "tokens of a prompt": ("/v1/completions", {"max_tokens": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_panic_is_a_500_of_ours(server: Running, wild_token: int, name: str) -> None:
    path, fields = CALLS[name]
    if path == "/detokenize":
        fields = {"tokens": [wild_token]}
    elif path == "/v1/completions" and "prompt" not in fields:
        fields = {**fields, "prompt": [wild_token, 5]}
    asked = f"panic-{name.replace(' ', '-')}"
    answer = httpx.post(server.url + path, json=fields, headers={"x-request-id": asked}, timeout=20)
    assert (answer.status_code, answer.headers.get("x-request-id")) == (500, asked), answer.text
    assert (answer.json()["error"]["code"], answer.headers["x-should-retry"]) == ("internal_error", "false")
    (logged,) = errors_of(server, asked)
    assert "LibraryPanicked" in logged["exception"]
    assert "##" not in json.dumps(logged)
    good = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=20)
    assert good.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_panic_in_a_replys_text_ends_that_reply_alone(
    server: Running, wild_token: int, stream: bool
) -> None:
    """It happens on the engine's thread. The neighbour's text is what it is alone, and the next reply comes."""
    wild = body(1, 8, logit_bias={str(wild_token): 100}, temperature=0, stream=stream)
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
        alone = await http.post("/v1/completions", json=body(2, 120))
        beside = asyncio.create_task(http.post("/v1/completions", json=body(2, 120)))
        broken = await http.post("/v1/completions", json=wild)
        if stream:
            *_, last, end, _ = broken.text.split("\n\n")
            assert (broken.status_code, end) == (200, "data: [DONE]")
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            error = broken.json()["error"]
            assert broken.status_code == 500
        assert error["code"] == "internal_error"
        assert (await beside).json()["choices"] == alone.json()["choices"]
        assert (await http.post("/v1/completions", json=body(3, 4))).status_code == 200
        assert (await http.get("/live")).status_code == 200
    lines = [one for one in server.log.read_text().splitlines() if "request failed request=" in one]
    assert len(lines) == 1 + stream


def test_the_checkpoint_is_the_demos_beside(server: Running, wild_token: int) -> None:
    """What is refused above is refused for its `#` alone."""
    for path, fields in (
        ("/tokenize", {"content": "# a " * 10}),
        ("/detokenize", {"tokens": [wild_token - 1, wild_token + 1]}),
    ):
        assert httpx.post(server.url + path, json=fields, timeout=20).status_code == 200
