"""What other servers were bitten by, the rule drawn from it, and the tests that hold it here.

Each row names one class of incidents (with an advisory as an example), our rule, and the tests; that those exist is
a test itself. Rules that no other file holds are held below.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.engine.settings import Settings
from slipstream.server.http import web_page as pages
from slipstream.server.http.app import create_app
from slipstream.server.http.auth import PUBLIC
from slipstream.server.http.gate import Gate
from tests.http.fake import FakeEngine
from tests.http.serving import Served, raw, served

ROOT = Path(__file__).parents[2]
HERE = "http/test_incidents.py"


class Incident(NamedTuple):
    """A class of incidents and what holds its rule: files below `tests/`, and tests in them."""

    name: str
    example: str
    rule: str
    tests: tuple[str, ...]


INCIDENTS = (
    Incident(
        "pickle between processes",
        "CVE-2025-30165",
        "no pickle anywhere; pickled weights are refused",
        (
            "test_architecture.py::test_nothing_is_ever_unpickled",
            "unit/test_weights.py::test_pickled_weights_are_refused_with_a_hint",
        ),
    ),
    Incident(
        "tensors out of requests",
        "CVE-2025-62164",
        "requests carry text and token ids, no tensors",
        (f"{HERE}::test_requests_carry_no_tensors",),
    ),
    Incident(
        "code from the model's repository",
        "CVE-2026-22807",
        "auto_map is ignored, no file of a model is imported",
        ("service/test_foreign_code.py::test_code_of_the_models_repository_is_left_alone",),
    ),
    Incident(
        "template injection",
        "CVE-2026-5760",
        "templates render in an immutable sandbox, with limits of size and steps",
        (
            "service/test_foreign_code.py::test_templates_do_not_reach_out",
            "unit/test_text_chat.py::test_a_failing_template_is_the_requests_fault",
            "unit/test_text_chat.py::test_a_runaway_template_is_stopped",
            "unit/test_template_sizes.py::test_what_a_template_makes_is_counted_before_it_is_made",
        ),
    ),
    Incident(
        "template parameters",
        "CVE-2025-62426",
        "no template comes with a request, and its arguments cannot replace what the server passes",
        (f"{HERE}::test_templates_do_not_come_with_requests", "http/test_wire.py::test_template_arguments"),
    ),
    Incident(
        "eval in tool parsing",
        "CVE-2025-9141",
        "nothing is evaluated, arguments are JSON",
        (f"{HERE}::test_nothing_is_evaluated",),
    ),
    Incident(
        "schemas and patterns that cost too much",
        "CVE-2025-48944",
        "size, depth and compile time of a grammar are bounded, and so is how many are kept",
        (
            "unit/test_grammar.py::test_a_grammar_that_cannot_be_is_refused_in_a_line",
            "unit/test_grammar.py::test_large_grammars_are_compiled_within_limits",
            "unit/test_grammar.py::test_compiled_grammars_are_kept_but_not_without_bound",
        ),
    ),
    Incident(
        "speculation beside other features",
        "CVE-2026-44223",
        "every drafter under every kind of sampling, in mixed batches, gives the text of plain decoding",
        ("oracle/test_lossless.py", "unit/test_engine.py::test_a_failing_drafter_costs_nothing_but_speed"),
    ),
    Incident(
        "control tokens in a user's text",
        "CVE-2026-44222",
        "text of messages never becomes a control token",
        (
            "unit/test_text_chat.py::test_control_tokens_in_messages_are_text",
            "unit/test_text_chat.py::test_two_inputs_side_by_side_make_no_control_token",
        ),
    ),
    Incident(
        "huge parameters",
        "CVE-2026-34756",
        "every number, list and text of a request has an upper bound",
        (
            "http/test_malformed.py::test_fields",
            "http/test_malformed.py::test_no_field_takes_a_number_out_of_range",
        ),
    ),
    Incident(
        "signs of integers",
        "CVE-2026-21869",
        "every number of a request has a lower bound",
        ("http/test_malformed.py::test_no_field_takes_a_number_out_of_range",),
    ),
    Incident(
        "huge headers and bodies",
        "CVE-2025-48956",
        "both are bounded in size and time",
        (
            "http/test_validation.py::test_a_huge_header_is_refused",
            "http/test_validation.py::test_body_limit",
            "http/test_listening.py::test_headers_drop_by_drop",
            "http/test_listening.py::test_a_body_that_does_not_come",
        ),
    ),
    Incident(
        "timing of keys and caches",
        "CVE-2025-59425",
        "all keys are compared in constant time; a key meets only its own cached prompts",
        (
            "http/test_access.py::test_every_key_is_compared",
            "http/test_access.py::test_keys_are_tenants_of_their_own",
            "http/test_wire.py::test_prompt_cache_is_salted",
        ),
    ),
    Incident(
        "paths that forgot the key",
        "vLLM's documentation: --api-key guards /v1 alone",
        "the key guards every path but the few that are named public",
        (f"{HERE}::test_every_other_path_asks_for_the_key",),
    ),
    Incident(
        "errors that tell too much",
        "CVE-2026-22778",
        "our faults are told in one generic sentence, and no input is told back",
        (
            "http/test_errors.py::test_our_own_faults_say_nothing",
            "http/test_malformed.py::test_input_is_never_told_back",
        ),
    ),
    Incident(
        "requests that make the server fetch",
        "CVE-2026-24779",
        "addresses in requests are opened with --allow-remote-images alone: public ones, each redirect checked anew",
        (f"{HERE}::test_nothing_here_can_fetch", f"{HERE}::test_addresses_in_messages_are_refused"),
    ),
    Incident(
        "damaged model files",
        "CVE-2026-7482",
        "headers, offsets and sizes are checked before anything is mapped; shards stay in the folder",
        (
            "unit/test_weights.py::test_bad_header_is_refused",
            "unit/test_weights.py::test_truncated_file_names_file_and_tensor",
            "unit/test_weights.py::test_index_may_not_leave_the_folder",
        ),
    ),
    Incident(
        "static files",
        "CVE-2025-62727",
        "a fixed table of files, whole or not at all",
        (f"{HERE}::test_files_come_from_a_table",),
    ),
    Incident(
        "open to the world by default",
        "175,000 open hosts, January 2026",
        "loopback unless told otherwise, and a loud warning without a key",
        (
            f"{HERE}::test_the_default_is_loopback",
            "http/test_lifecycle.py::test_open_to_all_without_a_key_warns",
        ),
    ),
    Incident(
        "pages of other origins",
        "llama.cpp #25655",
        "no other origin is allowed by default, and a loopback server answers to its own names only",
        (
            "http/test_access.py::test_nothing_for_other_origins",
            "http/test_access.py::test_host_names_on_loopback",
            "http/test_listening.py::test_other_origins_are_told_nothing",
            "http/test_listening.py::test_origins_are_exact",
        ),
    ),
    Incident(
        "stored script in the page",
        "Open WebUI's advisories",
        "texts are set as text, and the page's policy allows no script but its own",
        (f"{HERE}::test_the_page_sets_no_markup", "http/test_access.py::test_the_page"),
    ),
    Incident(
        "forged log lines",
        "the class, in many products",
        "what comes from outside is escaped; request ids are of a few harmless characters",
        (
            "http/test_logs.py::test_nothing_forges_a_line",
            "http/test_logs.py::test_what_clients_send_is_harmless",
            "http/test_access.py::test_request_ids",
        ),
    ),
)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda one: one.name)
def test_the_rule_is_held_by_tests_that_exist(incident: Incident) -> None:
    for named in incident.tests:
        file, _, test = named.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in found if test else any(name.startswith("test") for name in found), named


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    paths = [path for folder in ("server", "engine", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return [(path, ast.parse(path.read_text())) for path in paths]


def test_nothing_is_evaluated() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "literal_eval"}
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, (path, node.lineno)


def test_nothing_here_can_fetch() -> None:
    """What could open an address is imported by the downloader of models, the health check, the terminal's chat, and
    what fetches images where that is allowed.
    """
    clients = {
        "httpx",
        "requests",
        "urllib3",
        "aiohttp",
        "huggingface_hub",
        "urllib.request",
        "http.client",
        "ftplib",
    }
    allowed = {
        "engine/service/start/checkpoint_path.py": {"huggingface_hub"},
        "server/command/client.py": {"httpx"},
        "server/command/healthcheck.py": {"httpx"},
        "server/command/terminal_chat.py": {"httpx"},  # a program of its own, which is no part of a server
        "server/images/remote_image.py": {"httpx"},
    }
    for path, tree in modules():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        reaching = {name for name in found if name in clients or name.split(".")[0] in clients}
        name = str(path.relative_to(ROOT))
        top = {one if one in clients else one.split(".")[0] for one in reaching}
        assert top <= allowed.get(name, set()), name


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_addresses_in_messages_are_refused(server: Served, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/secret", "data": "http://127.0.0.1:1/secret"}}
    error = server.error(400, messages=[{"role": "user", "content": [part]}])
    assert error["param"].startswith("messages[0]")
    assert "secret" not in str(error)
    assert not server.engine.requests


@pytest.mark.parametrize("field", ["prompt_embeds", "inputs_embeds", "prompt_embedding"])
def test_requests_carry_no_tensors(server: Served, field: str) -> None:
    """Nobody reads such a field: without a prompt beside it the request is incomplete."""
    answer = server.post("/v1/completions", {field: "gASVAAAAAAAAAACMCGJ1aWx0aW5z"})
    assert answer.status_code == 400
    answer = server.post("/v1/completions", {"prompt": "a", field: "gASVAAAAAAAAAACMCGJ1aWx0aW5z"})
    if answer.status_code == 200:
        assert "gASV" not in repr(server.engine.requests)


def test_templates_do_not_come_with_requests(server: Served) -> None:
    source = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    assert server.error(400, chat_template=source)["param"] == "chat_template"
    for name in ("chat_template", "template", "messages", "tokenize", "add_generation_prompt"):
        answer = server.chat(chat_template_kwargs={name: source})
        assert answer.status_code == 400, name
        assert "popen" not in answer.text
    assert not server.engine.requests


def test_every_other_path_asks_for_the_key() -> None:
    public = PUBLIC | pages.FILES.keys()
    app = create_app(Gate(FakeEngine()), Settings(model="x", port=0, api_key="k"))
    paths = {route.path for router in app.routes for route in router.original_router.routes}
    assert {"/v1/chat/completions", "/metrics", "/slots", "/props", "/tokenize"} <= paths
    with served(api_key="k") as server:
        for path in sorted(paths - public):
            concrete = path.replace("{name:path}", "x").replace("{", "").replace("}", "")
            for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
                assert server.http.request(method, concrete).status_code == 401, (method, path)
        for path in (
            "//health",
            "/health/",
            "/HEALTH",
            "/health/../props",
            "/live;/props",
            "/%6cive/../props",
        ):
            answer = raw(
                server.port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
            )
            assert answer.startswith(b"HTTP/1.1 401 "), path


def test_files_come_from_a_table(server: Served) -> None:
    whole = server.http.get("/app.js")
    part = server.http.get(
        "/app.js", headers={"range": "bytes=0-0," + ",".join(f"{i}-{i}" for i in range(2000))}
    )
    assert (part.status_code, part.content) == (200, whole.content)
    for path in (
        "/../pyproject.toml",
        "/%2e%2e/pyproject.toml",
        "/..%2fpyproject.toml",
        "/app.js%00",
        "/webui/app.js",
    ):
        assert server.http.get(path).status_code == 404, path


def test_the_default_is_loopback() -> None:
    settings = Settings(model="x")
    assert (settings.host, settings.cors_origins, settings.otlp_endpoint) == ("127.0.0.1", None, None)


def test_the_page_sets_no_markup(server: Served) -> None:
    """Neither do its libraries on their own: the browser is told to refuse that."""
    assert server.http.get("/").headers["content-security-policy"] == (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http://",
    )
    sources = [path for path in (ROOT / "webui" / "src").rglob("*") if path.suffix in (".ts", ".tsx", ".css")]
    assert len(sources) > 20
    for path in [*sources, ROOT / "webui" / "index.html"]:
        text = path.read_text()
        assert not [word for word in forbidden if word in text], path.name
        assert len(text.splitlines()) <= 300, path.name
