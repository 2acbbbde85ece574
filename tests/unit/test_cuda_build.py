"""The way from a .cu to machine code: what it depends on, where it is kept, how it fails."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.kernels import user_cache
from slipstream.kernels.cuda import ahead, cubins, nvrtc
from slipstream.kernels.cuda.launcher import launch, launched_by, packed, refusal
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.dispatch import CannotRunError
from tests.emulator.resources import resources_of

KERNEL = """
#include "factor.cuh"
template <int N> __global__ void times(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * FACTOR + N;
}
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with a source and a header; its `cuda.py` is not needed."""
    (tmp_path / "factor.cuh").write_text("constexpr float FACTOR = 2.0f;\n")
    (tmp_path / "times.cu").write_text(KERNEL)
    return tmp_path / "cuda.py"


def source(
    written: Path, *, fuse: bool = True, instances: tuple[str, ...] = ("times<1>", "times<2>")
) -> Source:
    return Source(str(written), "times.cu", instances, fuse=fuse)


def test_the_second_process_does_not_compile(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = nvrtc.compiled(source(written), "sm_90a", tmp_path / "kept")
    assert "2 kernels" in caplog.text
    monkeypatch.setattr(nvrtc, "compile_now", lambda *_: pytest.fail("compiled again"))
    assert nvrtc.compiled(source(written), "sm_90a", tmp_path / "kept") == first
    assert first.cubin.startswith(b"\x7fELF")
    assert not list((tmp_path / "kept").glob(".*"))


@pytest.mark.parametrize("change", ["source", "header", "instances", "fuse", "arch", "compiler"])
def test_whatever_the_code_depends_on_makes_it_compile_again(
    change: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, instances = tmp_path / "kept", ("times<1>", "times<2>")
    nvrtc.compiled(source(written), "sm_90", kept)
    if change == "source":
        written.with_name("times.cu").write_text(KERNEL + "// more\n")
    if change == "header":
        written.with_name("factor.cuh").write_text("constexpr float FACTOR = 3.0f;\n")
    if change == "instances":
        instances = ("times<1>", "times<3>")
    if change == "compiler":
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 99))
    changed = source(written, fuse=change != "fuse", instances=instances)
    nvrtc.compiled(changed, "sm_80" if change == "arch" else "sm_90", kept)
    assert len(list(kept.glob("*.cubin"))) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "words"])
def test_a_damaged_file_is_compiled_again(
    damage: str, written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = nvrtc.compiled(source(written), "sm_90", tmp_path)
    (path,) = tmp_path.glob("*.cubin")
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    path.write_bytes({"cut": whole[:-100], "flipped": flipped, "empty": b"", "words": b"[]\n"}[damage])
    assert nvrtc.compiled(source(written), "sm_90", tmp_path).symbols == good.symbols
    assert "compiled again" in caplog.text
    assert cubins.load(tmp_path, path.stem) is not None


def test_a_folder_that_cannot_be_written_is_done_without(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "unkept", {})
    (tmp_path / "file").write_text("")
    code = nvrtc.compiled(source(written), "sm_90", tmp_path / "file" / "below")
    assert code.cubin.startswith(b"\x7fELF")
    assert "kernels cannot be kept in" in caplog.text


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cubins.user_folder() == Path("/somewhere/slipstream/cubins")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/who")
    assert cubins.user_folder() == Path("/home/who/.cache/slipstream/cubins")

    def homeless(_: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cubins.user_folder() is None


def test_code_is_there_ahead_of_the_first_start(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "sources", lambda: iter([source(written)]))
    told = list(ahead.compile_ahead(["sm_80", "sm_90a"], 2))
    assert [one.removeprefix(f"{source(written)!r} for ") for one in sorted(told)] == ["sm_80", "sm_90a"]
    folder = cubins.user_folder()
    assert folder is not None
    assert sorted(one.name.split("-")[1] for one in folder.iterdir()) == ["sm_80", "sm_90a"]
    monkeypatch.setattr(nvrtc, "compile_now", lambda *_: pytest.fail("compiled again"))
    nvrtc.compiled(source(written), "sm_80", folder)


def test_code_that_cannot_be_kept_or_made_ahead_is_a_failure(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(ahead, "sources", lambda: iter([source(written)]))
    with pytest.raises(CannotRunError, match="cannot be written to"):
        list(ahead.compile_ahead(["sm_80"], 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ahead, "sources", lambda: iter([source(written, instances=("none<1>",))]))
    with pytest.raises(CannotRunError, match="does not compile for sm_80"):
        list(ahead.compile_ahead(["sm_80"], 1))


def test_every_cu_has_a_source() -> None:
    files = {path.relative_to(ahead.KERNELS) for path in ahead.KERNELS.glob("*/*.cu")}
    assert files == {one.path.relative_to(ahead.KERNELS) for one in ahead.sources()}


def test_the_compilers_words_reach_the_caller(written: Path) -> None:
    written.with_name("factor.cuh").write_text("")
    with pytest.raises(CannotRunError, match=r'(?s)times\.cu.*identifier "FACTOR" is undefined'):
        nvrtc.compile_now(source(written), "sm_90")


def test_fusing_is_an_option_of_the_source(written: Path) -> None:
    """2 x + 1 in one instruction or in two."""
    fused = nvrtc.compile_now(source(written), "sm_90").cubin
    apart = nvrtc.compile_now(source(written, fuse=False), "sm_90").cubin
    assert fused != apart


def test_resources_are_read_from_the_assemblers_log(written: Path) -> None:
    written.with_name("times.cu").write_text(
        "template <int N> __global__ void __launch_bounds__(1024) times(float* x) {\n"
        "  __shared__ float tile[N]; float many[N];\n"
        "  for (int i = 0; i < N; ++i) many[i] = x[i * 7];\n"
        "  tile[threadIdx.x % N] = x[0]; __syncthreads();\n"
        "  for (int j = 0; j < 3; ++j) for (int i = 0; i < N; ++i) many[i] = many[i] * many[(i + 7) % N] + tile[j];\n"
        "  for (int i = 0; i < N; ++i) x[i] = many[i]; }\n"
    )
    found = resources_of(nvrtc.compile_now(source(written, instances=("times<4>", "times<200>")), "sm_90"))
    assert found["times<4>"].shared == 16
    assert found["times<4>"].spilled == 0
    assert found["times<200>"].shared == 800
    assert found["times<200>"].registers <= 64
    assert found["times<200>"].spilled + found["times<200>"].stack > 0


def test_spills_are_counted_in_both_directions() -> None:
    said = (
        "ptxas info    : Compiling entry function '_Z1av' for 'sm_90'\n"
        "ptxas         .    40 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem\n"
        "ptxas info    : Compiling entry function '_Z1bv' for 'sm_90'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers\n"
    )
    found = resources_of(nvrtc.Compiled(b"", {"a": "_Z1av", "b": "_Z1bv"}, said))
    assert found == {"a": (255, 512, 40, 32), "b": (8, 0, 0, 0)}


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_every_capability_has_its_architecture(capability: tuple[int, int], name: str) -> None:
    assert nvrtc.architecture(capability) == name


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_other_capabilities_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(CannotRunError, match=f"{capability[0]}.{capability[1]}"):
        nvrtc.architecture(capability)


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal.cache_clear()
    assert refusal(torch.device("cpu")) == "the device is cpu"
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("slipstream.kernels.cuda.launcher._driver_version", lambda: 12080)
    assert refusal(cuda) == "the driver is for CUDA 12.8; CUDA 13.0 is needed"
    refusal.cache_clear()
    monkeypatch.setattr("slipstream.kernels.cuda.launcher._driver_version", lambda: 13000)
    assert refusal(cuda) is None
    refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "7.5" in str(refusal(cuda))
    refusal.cache_clear()


def test_a_machine_without_cuda_core_refuses_and_still_imports() -> None:
    code = (
        "import sys, torch; sys.modules['cuda'] = None\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.get_device_capability = lambda _: (9, 0)\n"
        "from slipstream.kernels.ngram import cuda\n"
        "print(cuda.refuses(torch.device('cuda', 0), torch.int32))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cuda.core is not installed" in run.stdout
    assert "slipstream[cuda]" in run.stdout


def test_a_machine_without_a_driver_refuses() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver")
    from slipstream.kernels.cuda import launcher as module

    with pytest.raises(CannotRunError, match="driver"):
        module._driver_version()


def test_arguments_are_packed_for_the_driver() -> None:
    x = torch.zeros(3)
    address, nothing, number, real = packed((x, None, 7, 0.5))
    assert (address, nothing, number) == (x.data_ptr(), 0, 7)
    assert isinstance(real, ctypes.c_float)
    assert real.value == 0.5


def test_an_empty_grid_launches_nothing(written: Path) -> None:
    calls: list[object] = []
    with launched_by(lambda *call: calls.append(call)):
        launch(source(written), "times<1>", (0, 1, 1), 32)
        launch(source(written), "times<1>", (2, 1, 1), 32, None, shared=8)
    assert [call[1:] for call in calls] == [("times<1>", (2, 1, 1), 32, (None,), 8)]


def test_an_instance_is_named_once(written: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        source(written, instances=("times<1>", "times<1>"))
