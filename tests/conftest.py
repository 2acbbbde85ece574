"""For every test: one thread, poisoned memory, no environment of the developer's, every module loaded once."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator

import pytest

from tests import thinning

# Before torch loads, and for the servers that tests start: there are more threads than cores, so none may spin.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton decides when it loads whether its kernels are interpreted. `make test-gpu` wants them compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")
for _name in [name for name in os.environ if name.startswith("SLIPSTREAM_")]:
    del os.environ[_name]
# Clients of loopback servers trust nobody: to read the system's certificates took 27 ms for each of them.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
# The four folders are imported below `slipstream`. The repository's root is on the path too, so a bare name would load
# a second copy; transformers would do so where it looks whether there is a package `kernels`.
BARE_NAMES = ("server", "engine", "kernels", "webui")
for _name in BARE_NAMES:
    sys.modules[_name] = None  # type: ignore[assignment]  # importing it fails
# Modules and tests are loaded once and stay: looking for garbage among them took half of the time to collect tests.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="every case of the tests of which a sample runs else"
    )
    parser.addoption(
        "--extra-s",
        type=float,
        default=thinning.EXTRA_S,
        help="seconds for every case of files that are not as recorded (default: %(default)g)",
    )
    parser.addoption(
        "--record", action="store_true", help="with --whole: renew the record of these files, if all pass"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one process more than cores, as tests wait for servers, while each has 3 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) + 1, memory // (3 << 30)))


def pytest_configure(config: pytest.Config) -> None:
    is_part = config.option.keyword or any("::" in one for one in config.args)
    if config.getoption("--record") and (is_part or not config.getoption("--whole")):
        raise pytest.UsageError("--record goes with --whole, and with whole files")
    if not hasattr(config, "workerinput"):  # where reports of all processes arrive
        config.pluginmanager.register(thinning.Summary())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[thinning.WHOLE] = None
    if not config.getoption("--whole"):
        files = thinning.digests({thinning.path_of(item) for item in items if thinning.is_marked(item)})
        choice = thinning.choose(thinning.recorded(), files, config.getoption("--extra-s"))
        config.stash[thinning.WHOLE] = frozenset(choice.whole)
        items[:], left = thinning.thinned(items, choice)
        config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    gc.freeze()
    # What bindings see freed at the end of a process they do not report as leaks.
    atexit.register(gc.unfreeze)
    gc.enable()
    # By default a look follows every 700 new objects: a fifth of the time in which numba compiles.
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether every case of the test's file runs: a test marked `sampled` may do less otherwise."""
    assert thinning.is_marked(request.node), "unmarked files are not looked at for changes"
    files = request.config.stash[thinning.WHOLE]
    return files is None or thinning.path_of(request.node) in files


@pytest.fixture(autouse=True, scope="session")
def no_second_copies() -> Iterator[None]:
    """By the end of the session none of the folders has been loaded under its bare name."""
    yield
    assert not [name for name in BARE_NAMES if sys.modules.get(name) is not None]


@pytest.fixture(autouse=True, scope="session")
def triton_is_loaded_by_now() -> None:
    """Test modules that run its kernels have imported it; nobody else shall see how, nor their child processes."""
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` comes filled with NaN, so that memory read before it was written shows."""
    torch = sys.modules.get("torch")
    if torch is None:  # the tests at hand do without it
        yield
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(mode=False)
