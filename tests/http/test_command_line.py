"""The command `slipstream`: subcommands, what is suggested for words that are none, completion, the terminal's chat."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.settings import Settings
from slipstream.server.command import cli, starting, terminal_chat
from slipstream.server.command.completion import SHELLS, script
from slipstream.server.command.flags import OPTIONS
from slipstream.server.command.foreign_flags import FOREIGN
from slipstream.server.command.subcommands import SUBCOMMANDS
from slipstream.server.command.terminal_chat import Conversation, Terminal, _words
from tests.commanded import read_settings
from tests.http.fake import FakeEngine, words
from tests.http.serving import logged, served


@pytest.fixture(autouse=True)
def _logs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command configures the logs of its process, which here is that of other tests."""
    monkeypatch.setattr(starting, "configure_logs", lambda settings, environ: None)


def ended(*arguments: str, **environ: str) -> int:
    """Exit status of a command line."""
    try:
        return cli.dispatch(arguments, environ)
    except SystemExit as left:
        return int(left.code or 0)


def test_every_subcommand_is_listed_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    overview = capsys.readouterr().out
    for name, command in SUBCOMMANDS.items():
        assert f"\n  {name} " in overview
        assert command.summary in overview
        assert ended(name, "--help") == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"usage: slipstream {name} {command.usage}" in told
        assert command.about in told
        assert command.statuses in told
        for one in command.arguments:
            assert one.flag in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plann"], "slipstream: plann: no such subcommand; did you mean plan?"),
        (["xyz"], "no such subcommand; there are serve, ray-serve, chat, plan"),
        (["org/name"], "slipstream: org/name: is no subcommand; a model is given as -m org/name"),
        (["tests"], "a model is given as -m tests"),
        (["-m", "x", "--draft-mx", "3"], "unrecognized arguments: --draft-mx; did you mean --draft-max?"),
        (["-m", "x", "-mdd", "y"], "unrecognized arguments: -mdd; did you mean -md?"),
        (
            ["-m", "x", "--exact", "True"],
            "--exact True: a switch takes no value; write --exact alone, or --no-exact",
        ),
        (["-m", "x", "--no-webui=false"], "a switch takes no value; write --no-webui alone, or --webui for"),
        (["--exact=", "-m", "x"], "--exact : a switch takes no value"),
        (["-m", "x", "--mmap", "0"], "--mmap 0: a switch takes no value; write --mmap alone, or --no-mmap"),
        (["profile", "-m", "x", "--json=1"], "--json 1: a switch takes no value; write --json alone\n"),
        (["plan", "--memroy", "3"], "unrecognized arguments: --memroy; did you mean --memory?"),
        (["plan", "--port", "3"], "unrecognized arguments: --port"),
        (["-m", "x", "--spec-type", "sufix"], "'sufix' is not a drafter; did you mean suffix?"),
        (["-m", "x", "--log-level", "warn"], "did you mean warning?"),
        (["profile", "-m", "x", "--tasks", "0"], "0: must be a whole number of at least 1"),
        (["completion", "tcsh"], "choose from"),
        (["chat", "--max-tokens", "many"], "many: must be a whole number of at least 1"),
        (["chat", "--max-tokens", "1", "-n", "2"], "--n-predict and --max-tokens: give one of them"),
        (["chat", "-m", "x", "--url", "http://x"], "--model and --url: give one of them"),
        (["chat", "--ctx-size", "99"], "--ctx-size has no use with a server that runs already"),
        ([], "--model is needed"),
        (["compile"], "--model is needed"),
        (["compile", "--arch", "sm_90a,sm_91"], "--arch sm_91: none of sm_80, sm_89, sm_90, sm_90a"),
        (["compile", "--arch", ""], "--arch '': none of"),
        (["compile", "-m", "x", "--arch", "sm_90a"], "--model has no use with --arch"),
        (["compile", "--arch", "sm_90a", "-c", "4096"], "--ctx-size has no use with --arch"),
    ],
)
def test_words_that_mean_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert ended(*arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["-m", "./no/such"], ["-m", "org/name", "-md", "./no/such"]])
def test_a_missing_model_is_found_before_the_port_is_opened(
    caplog: pytest.LogCaptureFixture, flags: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # opening it would end with status 4
        assert ended(*flags, "--port", str(taken.getsockname()[1])) == 3
    assert "./no/such: no such folder" in caplog.text


@pytest.mark.parametrize(
    ("raised", "status"), [(BrokenPipeError, 128 + signal.SIGPIPE), (KeyboardInterrupt, 130)]
)
def test_a_command_that_is_cut_short_ends_without_a_traceback(
    raised: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(words: Sequence[str], environ: Mapping[str, str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "dispatch", cut_short)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == status


# --- flags of other servers ---


def read(*arguments: str) -> Settings:
    return read_settings(["-m", "x", *arguments], {})


def test_a_command_line_of_llama_server_runs_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    line = (
        "-ngl 99 -ngld 99 -fa -dt 0.1 -ub 512 --jinja -ctk f16 -ctv bf16 -c 0 --no-mmap --draft-max 16 -np 2"
    )
    settings = read(*line.split())
    assert settings == Settings(model="x", draft_max=16, parallel=2)
    assert ended("-m", "./no/such", *line.split()) == 3
    idle = {one["flag"]: one["reason"] for one in logged(caplog, "flag_without_effect")}
    assert set(idle) == {"-ctk", "-ctv", "-fa", "-dt", "-ub", "--jinja", "--no-mmap"}
    assert idle["--jinja"] == "templates are always rendered with jinja"


def test_of_a_switch_the_log_names_the_side_that_was_given(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    assert ended("-m", "./no/such", "--no-warmup", "-nocb", "--mmap") == 3
    assert {one["flag"] for one in logged(caplog, "flag_without_effect")} == {
        "--no-warmup",
        "-nocb",
        "--mmap",
    }


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["-ngl", "0"], {"device": "cpu"}),
        (["--n-gpu-layers", "all", "-ngld", "0"], {"device_draft": "cpu"}),
        (["-ngl", "-1"], {}),
        (["-ngl", "0", "--device", "cuda"], {"device": "cuda"}),
        (["--reasoning-format", "none"], {"reasoning_field": "none"}),
        (["-v"], {"log_level": "debug"}),
        (["-lv", "1"], {"log_level": "error"}),
        (["-fa", "on", "-c", "64"], {"ctx_size": 64}),
        (["-n", "32", "-np", "2"], {"n_predict": 32, "parallel": 2}),
        (["--predict", "-1", "--repeat-penalty", "1.1"], {"repeat_penalty": 1.1}),
        (
            ["--presence-penalty", "1.5", "--repeat-last-n", "8"],
            {"presence_penalty": 1.5, "repeat_last_n": 8},
        ),
        (["--reasoning-budget", "0"], {"reasoning_budget": 0}),
        (["--reasoning-budget", "-1", "-rea", "on"], {"reasoning": "on"}),
        (["--skip-chat-parsing", "--log-jsonl"], {"chat_format": "none", "log_format": "json"}),
        (["--log-disable", "--no-ui"], {"log_level": "error", "webui": False}),
        (["--no-webui"], {"webui": False}),
        (["--dry-multiplier", "0", "-ncmoe", "0", "--sleep-idle-seconds", "-1"], {}),
        (["-ctkd", "f16", "-nocb", "-no-kvu", "--no-warmup", "-sps", "0.5", "-cms", "64"], {}),
        (["--max-model-len", "64", "--served-model-name", "a"], {"ctx_size": 64, "alias": "a"}),
    ],
)
def test_flags_that_act(arguments: list[str], changed: dict[str, Any]) -> None:
    assert read(*arguments) == Settings(**{"model": "x", **changed})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-ngl", "20"], "-ngl 20: layers are on one device: 0 means the CPU, 99 or all the GPU"),
        (
            ["-ctk", "q8_0"],
            "-ctk q8_0: keys and values are cached in the model's type, or with --kv-cache-dtype fp8",
        ),
        (["--reasoning-format", "x"], "--reasoning-format x: must be one of none, deepseek, auto"),
        (["-lv", "x"], "-lv x: must be a whole number"),
        (["-ngl"], "expected one argument"),
        (["--dry-multiplier", "0.8"], "--dry-multiplier 0.8: this sampler is not supported"),
        (["--rope-scale", "2"], "--rope-scale 2: positions are scaled as the model's files say"),
        (["--reasoning-budget", "-2"], "--reasoning-budget -2: "),
        (["--lora", "a.gguf"], "--lora a.gguf: LoRA adapters are not supported"),
        (["--chat-template", "chat-ml"], "--chat-template chat-ml: must be Jinja text or one of chatml, "),
        (["--chat-template", "{{ a }}", "--chat-template-file", "f"], "--chat-template is given too"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: "),
        (["--remote-image-hosts", "a"], "--remote-image-hosts a: has no use without --allow-remote-images"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: Input should be an object"),
        (["--chat-template-kwargs", '{"tools": 1}'], "--chat-template-kwargs: tools may not be set"),
    ],
)
def test_flags_that_would_change_results_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert ended("-m", "x", *arguments) == 2
    assert told in capsys.readouterr().err


def test_no_foreign_flag_is_a_setting_too() -> None:
    named = [flag for one in FOREIGN for flag in one.flags]
    own = {flag for option in OPTIONS for flag in option.flags}
    assert len(named) == len(set(named))
    assert not {*named} & own


# --- completion ---


def completed(line: str) -> list[str]:
    """What bash offers at the end of the line."""
    code = f"""{script("bash", SUBCOMMANDS)}
        COMP_WORDS=({line}); [[ "{line}" == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _slipstream; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert not found.stderr
    return found.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("slipstream pl", ["plan"]),
        ("slipstream plan --mem", ["--memory"]),
        ("slipstream --draft-ma", ["--draft-max"]),
        ("slipstream serve --no-spec", ["--no-spec-adaptive"]),
        ("slipstream serve --dtype b", ["bfloat16"]),
        ("slipstream -m x --spec-type suf", ["suffix"]),
        ("slipstream completion z", ["zsh"]),
        ("slipstream serve -m tes", []),  # files are bash's own
        ("slipstream plan --spec-ngram", []),
    ],
)
def test_bash_completes(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize(
    ("word", "offered"),
    [("--dtype=bf", ["--dtype=bfloat16"]), ("--spec-type=suf", ["--spec-type=suffix"]), ("--log-file=x", [])],
)
def test_values_behind_an_equals_sign_where_the_shell_keeps_it_in_the_word(
    word: str, offered: list[str]
) -> None:
    """As zsh does, and bash without = in COMP_WORDBREAKS."""
    assert completed(f"slipstream serve {word}") == offered


def test_bash_offers_all_subcommands() -> None:
    assert {*SUBCOMMANDS} <= {*completed("slipstream ")}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("completion", shell) == 0
    text = capsys.readouterr().out
    assert ("-l config -r -d 'TOML" if shell == "fish" else " --config ") in text
    for command in SUBCOMMANDS.values():
        for flag in (flag for option in command.options for flag in option.flags):
            if shell != "fish":
                assert flag in text
            else:
                assert (f"-l {flag[2:]} " if flag[:2] == "--" else f"-o {flag[1:]} ") in text


# --- chat ---


def talked(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return ended("chat", *arguments)


REPLY = "w0 w1 w2 w3 w4 w5 w6"


def test_a_conversation_with_a_running_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(script=words)
    flags = ["--system", "Be brief.", "-n", "7", "--temperature", "0.5", "--repeat-penalty", "1.5"]
    with served(engine) as server:
        typed = "first\\\nline\n\nsecond\n/new\n/help\n/etc is?\n/exit\nnever\n"
        assert talked(monkeypatch, typed, "--url", server.url, *flags) == 0
    system = {"role": "system", "content": "Be brief."}
    asked = [one.prompt.messages for one in engine.requests if isinstance(one.prompt, Chat)]
    assert [[(message["role"], message["content"]) for message in one] for one in asked] == [
        [(system["role"], system["content"]), ("user", "first\nline")],
        [
            *((system["role"], system["content"]), ("user", "first\nline")),
            *(("assistant", f"{REPLY} "), ("user", "second")),
        ],
        [(system["role"], system["content"]), ("user", "/etc is?")],
    ]
    assert {one.max_tokens for one in engine.requests} == {7}
    assert {(one.sampling.temperature, one.sampling.repeat_penalty) for one in engine.requests} == {
        (0.5, 1.5)
    }
    out = capsys.readouterr().out
    assert out.count(REPLY) == 3
    assert "7 tokens" in out
    assert " tokens a pass · ngram-simple 2 · draft-model 2\n" in out
    assert "\033" not in out  # not a terminal


def test_tokens_have_the_colour_of_their_drafter() -> None:
    terminal = Terminal(lambda text: None, ["suffix", "draft-model"], colours=True)
    assert terminal.tinted("a", "draft-model") == "\033[35ma\033[0m"
    assert terminal.tinted("a", "suffix") == "\033[36ma\033[0m"
    assert terminal.tinted("a", None) == terminal.tinted("a", "unheard-of") == "a"
    assert Terminal(lambda text: None, ["suffix"], colours=False).tinted("a", "suffix") == "a"


def test_a_key_and_a_prefix_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(api_key="sécret", api_prefix="/llm") as server:
        where = ["--port", str(server.port), "--api-prefix", "/llm"]
        assert talked(monkeypatch, "hello\n", *where, "--api-key", "sécret") == 0
        assert "w0 w1" in capsys.readouterr().out
        assert talked(monkeypatch, "hello\n", *where, "--api-key", "wrong") == 1
        assert "key" in capsys.readouterr().err


def test_what_a_server_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as server:
        assert talked(monkeypatch, f"{'word ' * 600}\n", "--url", server.url) == 1
        assert "maximum context length is 512 tokens" in capsys.readouterr().out
    assert talked(monkeypatch, "hello\n", "--url", server.url) == 1
    assert f"no server at {server.url}" in capsys.readouterr().err


def test_its_own_server_has_the_settings_but_for_where_it_listens() -> None:
    given = "--api-key k --api-prefix /llm --port 9 -np 2 --no-exact --no-spec-adaptive"
    words = _words(read(*given.split()), "/s.sock")
    assert read_settings(words, {}) == Settings(
        model="x", parallel=2, spec_adaptive=False, host="/s.sock", log_level="warning"
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_ends_its_own_server_too(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: process)
    monkeypatch.setattr(terminal_chat, "_wait_for", lambda client, process: os.kill(os.getpid(), number))
    before = {one: signal.signal(one, lambda *told: None) for one in (signal.SIGHUP, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit), terminal_chat._own_server(Settings(model="x"), {}):
            pass
        assert process.poll() == -signal.SIGTERM
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        process.kill()
        process.wait()


def test_bytes_that_are_not_utf_8_are_asked_as_far_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(script=words)
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", typed)
    with served(engine) as server:
        assert ended("chat", "--url", server.url, "--system", "s\udcff") == 0
    (asked,) = (one.prompt.messages for one in engine.requests if isinstance(one.prompt, Chat))
    assert [message["content"] for message in asked] == ["s\ufffd", "caf\ufffd"]


def test_ctrl_c_ends_the_reply_and_not_the_conversation() -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if "w3" in text:
            raise KeyboardInterrupt

    engine = FakeEngine(script=words)
    with served(engine) as server:
        talk = Conversation(server.http, Terminal(write, [], colours=False), {}, None)
        talk.say("hello")
    assert "".join(written).startswith("w0 w1 w2 w3 w4 w5  [stopped]\nngram-simple 2")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["content"] == "w0 w1 w2 w3 w4 w5 "
