"""Settings from flags, environment, file and defaults; the table of them; what importing the app loads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.engine.settings import Settings
from slipstream.server.command import flags
from slipstream.server.describe import flags_table
from tests.commanded import read_settings


def read(*arguments: str, **environ: str) -> Settings:
    return read_settings(["-m", "x", *arguments], environ)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        read(*arguments, **environ)
    assert caught.value.code == 2
    return capsys.readouterr().err.rpartition("error: ")[2].strip()


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text('ctx-size = 100\nparallel = 2\ntemperature = 1\nspec_adaptive = false\nalias = "t"\n')
    return path


def test_defaults() -> None:
    assert read() == Settings(model="x")


def test_precedence(toml: Path) -> None:
    config = ["--config", str(toml)]
    assert read(*config) == Settings(
        model="x", ctx_size=100, parallel=2, temperature=1.0, spec_adaptive=False, alias="t"
    )
    environ = {"SLIPSTREAM_CTX_SIZE": "200", "SLIPSTREAM_SPEC_ADAPTIVE": "1", "SLIPSTREAM_PARALLEL": "3"}
    both = read(*config, **environ)
    assert (both.ctx_size, both.spec_adaptive, both.parallel, both.alias) == (200, True, 3, "t")
    all_three = read(*config, "-c", "300", "--no-spec-adaptive", **environ)
    assert (all_three.ctx_size, all_three.spec_adaptive, all_three.parallel) == (300, False, 3)
    assert read(SLIPSTREAM_CONFIG=str(toml)).ctx_size == 100
    assert read(*config, SLIPSTREAM_CONFIG="elsewhere.toml").ctx_size == 100


def test_a_file_of_a_windows_editor(toml: Path) -> None:
    toml.write_bytes(b"\xef\xbb\xbfctx-size = 100\r\nparallel = 2\r\n")
    assert read("--config", str(toml)) == Settings(model="x", ctx_size=100, parallel=2)


def test_llama_cpps_names() -> None:
    settings = read(
        *("-c", "4096", "-np", "8", "-md", "draft", "-devd", "cuda:1", "-b", "512", "-t", "2", "-a", "name"),
        *("-s", "7", "--spec-draft-n-max", "5", "--draft-n-min", "1", "--spec-draft-p-min", "0.5"),
        *("--temp", "0.7", "--spec-ngram-simple-size-n", "3"),
    )
    assert (settings.ctx_size, settings.parallel, settings.model_draft) == (4096, 8, "draft")
    assert (settings.device_draft, settings.batch_size, settings.threads) == ("cuda:1", 512, 2)
    assert (settings.alias, settings.seed, settings.temperature) == ("name", 7, 0.7)
    assert (settings.draft_max, settings.draft_min, settings.draft_p_min) == (5, 1, 0.5)
    assert settings.spec_ngram_simple_size_n == 3
    for names in (("--ngram-size-n", "3"), ("--spec-ngram-size-n", "3")):
        assert read(*names).spec_ngram_simple_size_n == 3
    files = read("-lcs", "static.bin", "-lcd", "dynamic.bin")
    assert (files.lookup_cache_static, files.lookup_cache_dynamic) == ("static.bin", "dynamic.bin")
    assert read_settings(["serve", "-hf", "org/name"], {}).model == "org/name"
    assert read("--ctx-size=64").ctx_size == 64


def test_a_drafters_settings_have_a_name_in_each_source(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('spec-shared-history = "tenant"\nspec_synth_len = 3\nspec-ngram-mod-n-min = 4\n')
    settings = read(
        *("--config", str(path), "--spec-ngram-map-k-size-n", "5"),
        SLIPSTREAM_SPEC_NGRAM_MAP_K4V_SIZE_M="6",
        SLIPSTREAM_SPEC_SYNTH_LEN="2.5",
    )
    assert (settings.spec_shared_history, settings.spec_ngram_mod_n_min) == ("tenant", 4)
    assert (settings.spec_ngram_map_k_size_n, settings.spec_ngram_map_k4v_size_m) == (5, 6)
    assert settings.spec_synth_len == 2.5


def test_unknown_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--nope" in refused(capsys, "--nope")
    assert "-ngx" in refused(capsys, "-ngx", "5")
    assert "--ctx" in refused(capsys, "--ctx", "5")  # no abbreviations
    assert refused(capsys, "--ctx-sze=5").endswith("arguments: --ctx-sze=5; did you mean --ctx-size?")
    assert refused(capsys, SLIPSTREAM_CTX="5") == "unknown environment variable SLIPSTREAM_CTX"
    hint = "; did you mean SLIPSTREAM_CTX_SIZE?"
    assert refused(capsys, SLIPSTREAM_CTXSIZE="5") == f"unknown environment variable SLIPSTREAM_CTXSIZE{hint}"
    path = tmp_path / "a.toml"
    for text, told in (
        ("ctx_siez = 1", "unknown key ctx_siez; did you mean ctx_size?"),
        ("ctx-size = 9\nctx_size = 9", "given twice: ctx_size"),
        ("[model]\na = 1", "from "),
        ("=", "a.toml"),
    ):
        path.write_text(text)
        assert told in refused(capsys, "--config", str(path))
    path.write_bytes(b"# Ger\xe4t\n")
    assert refused(capsys, "--config", str(path)).startswith(f"{path}: ")
    assert "missing.toml" in refused(capsys, "--config", str(tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-np", "0"], "--parallel 0: must be at least 1 (from the command line)"),
        (["--draft-max", "65"], "--draft-max 65: must be at most 64"),
        (["--port", "65536"], "must be at most 65535"),
        (["--dtype", "int3"], "must be one of auto, float32"),
        (["--spec-order", "random"], "must be one of value, fixed"),
        (["--spec-shared-history", "on"], "must be one of off, tenant, all"),
        (["--spec-ngram-map-k4v-min-hits", "0"], "--spec-ngram-map-k4v-min-hits 0: must be at least 1"),
        (["--spec-synth-len", "0.5"], "must be at least 1"),
        (["-c", "many"], "--ctx-size many (from the command line): Input should be a valid integer"),
        (["-c", "1.5"], "valid integer"),
        (["--port", "x" * 65], f"--port {'x' * 64}… (from the command line): "),
        (["--port", "a\x1b[1m\n"], "--port a\\x1b[1m\\n (from the command line): "),
        (["--port", ""], "--port '' (from the command line): "),
        (["--temp", "nan"], "--temperature nan (from the command line): Input should be a finite number"),
        (["--temp", "inf"], "finite number"),
        (["-s", "-1"], "--seed -1: must be at least 0"),
        (["-s", str(2**64)], "must be at most"),
        (["--api-key", " , "], "no key in it"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such: No such file"),
        (["--api-prefix", "llm"], "--api-prefix llm: must begin with / and not end with it"),
        (["--cors-origins", "*"], "--cors-origins *: is neither localhost nor an exact origin"),
        (["--ssl-key-file", "k"], "--ssl-key-file k: --ssl-cert-file is needed too"),
        (["--ssl-cert-file", "c"], "--ssl-cert-file c: --ssl-key-file is needed too"),
        (["--otlp-endpoint", "foo"], "--otlp-endpoint foo: must be an http or https address"),
        (["--otlp-endpoint", "grpc://foo:4317"], "must be an http or https address"),
        (["--otlp-endpoint", "me:secret@foo"], "--otlp-endpoint foo: must"),
        (["--otlp-endpoint", "http:///x"], "must be an http or https address"),
        (["--spec-type", "none,suffix"], "--spec-type none,suffix: none must stand alone"),
        (["--host", "unix:"], "a path is needed after unix:"),
        (["-to", "0"], "--timeout 0.0: must be at least 0.1"),
        (["--log-format", "xml"], "must be one of auto, json, text"),
        (["--port"], "expected one argument"),
    ],
)
def test_bounds(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert told in refused(capsys, *arguments)


def test_bytes_that_are_no_text_are_refused_in_what_clients_see(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--alias", "a\udcff")
    assert told == "--alias a\ufffd: is not UTF-8 (from the command line)"
    assert refused(capsys, SLIPSTREAM_TAGS="\udcff").startswith("--tags \ufffd: is not UTF-8")
    assert read("--log-file", "a\udcff").log_file == "a\udcff"


def test_the_wrong_value_is_traced_to_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, SLIPSTREAM_PARALLEL="0").endswith("(from SLIPSTREAM_PARALLEL)")
    collector = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert refused(capsys, **{collector: "foo"}).endswith(f"(from {collector})")
    path = tmp_path / "a.toml"
    path.write_text('parallel = "4"')
    assert f'--parallel "4" (from {path}): Input should be a valid integer' in refused(
        capsys, "--config", str(path)
    )
    path.write_text("parallel = true")
    assert "valid integer" in refused(capsys, "--config", str(path))


def test_empty_variables_are_unset() -> None:
    assert read(SLIPSTREAM_API_KEY="", SLIPSTREAM_CTX_SIZE="").ctx_size is None


def test_a_key_of_the_wrong_kind_is_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('api-key = ["secret"]')
    assert refused(capsys, "--config", str(path)).startswith(f"--api-key (from {path}): ")


@pytest.mark.parametrize("name", ["SLIPSTREAM", "SLIPSTREAM_CANARY"])
def test_what_kubernetes_tells_of_a_service_is_no_setting(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Of one that has the server's name, in every container beside it."""
    at, port = "tcp://10.0.0.1:8080", f"{name}_PORT_8080_TCP"
    told = {
        f"{name}_SERVICE_HOST": "10.0.0.1",
        f"{name}_SERVICE_PORT": "8080",
        f"{name}_SERVICE_PORT_HTTP": "8080",
        f"{name}_PORT": at,
        port: at,
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "8080",
        f"{port}_ADDR": "10.0.0.1",
    }
    assert read(**told) == Settings(model="x")
    assert read(**(told | {"SLIPSTREAM_PORT": "81", "SLIPSTREAM_PARALLEL": "2"})).port == 81
    unknown = refused(capsys, **told, SLIPSTREAM_SERVICE="1")
    assert unknown.startswith("unknown environment variable SLIPSTREAM_SERVICE")
    del told[f"{name}_SERVICE_HOST"]
    assert f"environment variable {name}_SERVICE_PORT" in refused(capsys, **told)


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings([], {})
    assert "--model is needed" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            read_settings([flag], {})
        assert caught.value.code == 0
    text = capsys.readouterr().out
    for group in set(flags.GROUP_STARTS.values()):
        assert f"\n{group.lower()}:\n" in text
    assert "--no-spec-adaptive" in text
    assert "off, tenant, all (default: off)" in " ".join(text.split())
    assert "--spec-ngram-simple-size-n N, --ngram-size-n N" in text
    assert text.splitlines()[-1].startswith("slipstream ")


def test_every_setting_has_its_names() -> None:
    assert [option.name for option in flags.OPTIONS] == [one.name for one in dataclasses.fields(Settings)]
    assert set(flags.GROUP_STARTS) <= set(flags.BY_NAME)
    every = [flag for option in flags.OPTIONS for flag in option.flags]
    assert len(every) == len(set(every))


def test_the_table(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# A\n{flags_table.START}\nold\n{flags_table.END}\nB\n")
    assert flags_table.main([str(path), "--check"]) == 1
    assert "old" in path.read_text()
    assert flags_table.main([str(path)]) == 0
    text = path.read_text()
    assert text.startswith("# A\n<!-- flags -->\n**Model**\n")
    assert text.endswith("<!-- /flags -->\nB\n")
    assert "| `--parallel`, `-np` | `4` | slots: requests computed at the same time |" in text
    assert "`--spec-adaptive`, `--no-spec-adaptive` | on |" in text
    assert flags_table.main([str(path), "--check"]) == 0
    with pytest.raises(ValueError, match="no <!-- flags -->"):
        flags_table.updated("nothing here")


def test_no_torch_is_loaded() -> None:
    heavy = {"torch", "numba", "transformers", "slipstream.engine.service"}
    modules = ("describe.flags_table", "http.app", "command.cli", "command.serve")
    code = "import sys\n" + "".join(
        f"import slipstream.server.{one}\nprint(*('{one} loads ' + other for other in {heavy} & set(sys.modules)))\n"
        for one in modules
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
