"""The container files against the code they start, and against rules that hadolint (`make check`) does not have."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.engine.settings import Settings
from slipstream.server.command.ray_serve import call_of
from tests.commanded import read_settings
from tests.docker.dockerfile import Stage, filled, read

ROOT = Path(__file__).parents[2]
STAGES = read(ROOT / "docker" / "Dockerfile")
BUILD, FINAL = STAGES
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
CUDA: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.cuda.yaml").read_text())
# Keys of a service in the compose specification that are used here; a misspelt one is a mistake.
SERVICE_KEYS = {
    *("image", "build", "command", "environment", "ports", "volumes", "stop_grace_period", "restart"),
    *("read_only", "tmpfs", "cap_drop", "security_opt", "gpus"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_can_be_replayed(stage: Stage) -> None:
    """A base of a certain version; no step that would fetch to the machine that replays it, or change that machine."""
    assert re.search(r":\d[\w.-]*$", stage.base)
    for step in stage.all("RUN"):
        assert not re.search(r"\b(curl|wget|apt(-get)?)\b", step.rest), step


def test_what_is_installed_is_pinned() -> None:
    """By constraints.txt: hadolint takes any version, and asks for none where a folder is installed."""
    installs = [step.rest for step in BUILD.all("RUN") if "pip install" in step.rest]
    assert installs
    assert all(one.count("pip install") == 1 and "constraints.txt" in one for one in installs)
    assert not [step for step in FINAL.all("RUN") if "pip" in step.rest]  # the build's tools stay behind


def test_the_last_user_is_nobody_special() -> None:
    uid, _, gid = FINAL.last("USER").rest.partition(":")
    assert uid == gid
    made = next(step.rest for step in FINAL.all("RUN") if "useradd" in step.rest)
    assert f"--uid {uid}" in made
    after = FINAL.steps[FINAL.steps.index(FINAL.last("USER")) :]
    assert not [step for step in after if step.word in ("RUN", "COPY")]  # they would belong to that user


def test_only_the_cache_is_written_to() -> None:
    volume = FINAL.last("VOLUME").rest
    env = FINAL.last("ENV").pairs
    assert all(env[name].startswith(volume) for name in ("HOME", "HF_HOME"))
    assert not env.keys() & {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}  # kernels are kept below the home folder
    assert any(f"chown 10001:10001 {volume}" in step.rest for step in FINAL.all("RUN"))


def test_labels() -> None:
    labels = FINAL.last("LABEL").pairs
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = ("title", "description", "licenses", "version", "revision")
    assert set(labels) == {f"org.opencontainers.image.{one}" for one in wanted}
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    versions = [step.pairs["VERSION"] for step in FINAL.all("ARG") if "VERSION" in step.pairs]
    assert versions == [project["version"]]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    copied = set()
    for stage in STAGES:
        for step in stage.all("COPY"):
            *sources, _ = step.arguments
            if "from" not in step.flags:
                copied |= set(sources)
    assert all((ROOT / one).exists() for one in copied)
    assert copied == kept
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
        "include"
    ]
    assert all(any(fnmatch.fnmatch(one, glob) for one in copied) for glob in packages)


def test_the_command_starts_a_server_with_the_demo() -> None:
    assert FINAL.last("ENTRYPOINT").arguments == ["slipstream"]
    settings = read_settings(FINAL.last("CMD").arguments, FINAL.last("ENV").pairs)
    assert settings.host == "0.0.0.0"
    assert settings.port == int(FINAL.last("EXPOSE").rest) == Settings().port
    folder = Path(FINAL.last("WORKDIR").rest)
    copied = {Path(step.arguments[-1]) for step in FINAL.all("COPY")}
    assert {folder / settings.model, folder / (settings.model_draft or "")} <= copied
    assert FINAL.last("STOPSIGNAL").rest == "SIGTERM"


def test_the_health_check_is_our_own() -> None:
    check = FINAL.last("HEALTHCHECK")
    assert check.rest.endswith('CMD ["slipstream", "healthcheck"]')
    assert set(check.flags) >= {"interval", "timeout", "start-period"}


def test_compose() -> None:
    assert set(COMPOSE) == {"services", "volumes"}
    (service,) = COMPOSE["services"].values()
    assert set(service) <= SERVICE_KEYS
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    arguments = {name for stage in STAGES for step in stage.all("ARG") for name in step.pairs}
    assert set(service["build"]["args"]) <= arguments
    named = [volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("$")]
    assert set(named) == set(COMPOSE["volumes"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # no key is set
    assert service["read_only"] is True


def test_workers_on_kubernetes_grow_with_the_replicas() -> None:
    spec = yaml.safe_load((ROOT / "docker" / "kuberay.yaml").read_text())["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    call = call_of(application["args"])
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (call.own["replicas"], call.own["max_replicas"]) == (
        workers["minReplicas"],
        workers["maxReplicas"],
    )
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"] is True  # else KubeRay keeps to `replicas`


def test_compose_settings_are_ours() -> None:
    (service,) = COMPOSE["services"].values()
    environ = {
        name: str(value).partition("-")[2].rstrip("}") or "" for name, value in service["environment"].items()
    }
    environ["SLIPSTREAM_SHUTDOWN_TIMEOUT"] = str(service["environment"]["SLIPSTREAM_SHUTDOWN_TIMEOUT"])
    settings = read_settings(service["command"], environ)
    assert (settings.model, settings.model_draft) == ("demo/target", "demo/draft")
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.shutdown_timeout


def test_the_cuda_variant_changes_only_what_is_built_and_the_devices() -> None:
    (name,), (laid_over,) = COMPOSE["services"], CUDA["services"]
    assert name == laid_over
    assert CUDA["services"][name] == {
        "image": "slipstream:cuda",
        "build": {"args": {"TORCH_INDEX": "", "EXTRAS": "cuda"}},
        "gpus": "all",
    }


def test_variables_are_filled_as_docker_does() -> None:
    assert filled("a ${B} $C ${D:-e} ${F}", {"B": "1", "C": "2"}) == "a 1 2 e "


def test_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        'ARG V=3\nFROM a:${V} AS one\n# no\nRUN x \\\n    && y\nCOPY --from=b c d\nCMD ["e", "f g"]\n'
    )
    (stage,) = read(path)
    assert (stage.base, stage.name) == ("a:3", "one")
    run, copy, command = stage.steps
    assert (run.rest, run.line) == ("x && y", 4)
    assert (copy.flags, copy.arguments) == ({"from": "b"}, ["c", "d"])
    assert command.arguments == ["e", "f g"]
    path.write_text("FROM a:1\nRUNN x\n")
    with pytest.raises(ValueError, match="RUNN"):
        read(path)
