"""Faults of a whole server process on the demo pair: an engine that dies, signals under load, a violent end."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.process import Running, forked
from tests.service.asking import ARGUMENTS, ask, n_busy

ABOUT = ("tests/service/faulty.py", "engine/device_loss.py", "engine/service/run/*.py")


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("cause", ["error", "exit", "hang"])
async def test_an_engine_that_dies_ends_everything(tmp_path: Path, cause: str) -> None:
    """Who waits is told, probes fail, and the status makes a supervisor start anew."""
    arguments = (*ARGUMENTS, "--step-timeout", "1") if cause == "hang" else ARGUMENTS
    with forked(tmp_path / "log", arguments, "tests.service.faulty") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            streams = [asyncio.create_task(ask(http, number, 400, stream=True)) for number in range(3)]
            whole = asyncio.create_task(ask(http, 9, 400))
            while (await n_busy(http))[0] < 4:
                await asyncio.sleep(0.02)
            last = asyncio.create_task(http.post("/v1/completions", json={"prompt": f"BREAK {cause}"}))
            *streamed, answer, refused = await asyncio.gather(*streams, whole, last)
            for one in streamed:
                *_, error, end, empty = one.text.split("\n\n")
                assert (end, empty) == ("data: [DONE]", "")
                assert json.loads(error.removeprefix("data: "))["error"]["type"] == "unavailable_error"
            assert (answer.status_code, refused.status_code) == (503, 503)
            try:
                assert (await http.get("/live")).status_code == 503
                assert (await http.get("/health")).json()["status"] == "failed"
            except httpx.TransportError:  # it has ended already
                pass
        assert server.process.wait(60) == 1
        told = "--step-timeout" if cause == "hang" else "the engine has stopped"
        assert told in server.log.read_text()
        assert "0x" not in answer.text
        assert "put in" not in answer.text + "".join(one.text for one in streamed)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_lost_device_ends_requests_and_probes_and_the_process_if_it_is_asked_to(
    tmp_path: Path, *, leaves: bool
) -> None:
    arguments = (*ARGUMENTS, "--exit-on-device-error") if leaves else ARGUMENTS
    with forked(tmp_path / "log", arguments, "tests.service.faulty") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            streamed = asyncio.create_task(ask(http, 1, 400, stream=True))
            while (await n_busy(http))[0] < 1:
                await asyncio.sleep(0.02)
            refused = await http.post("/v1/completions", json={"prompt": "BREAK device"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "device_failed"
            *_, error, _, _ = (await streamed).text.split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "device_failed"
            if not leaves:
                await _stays_and_says_why(http)
                server.process.terminate()
        assert server.process.wait(60) == (1 if leaves else 0)
        log = server.log.read_text()
        assert log.count("an illegal memory access") == log.count("the engine has stopped") == 1


async def _stays_and_says_why(http: httpx.AsyncClient) -> None:
    """The server of a lost device answers every probe and request, and never as if it were well."""
    await asyncio.sleep(0.6)  # a look at the engine's status, at least
    live, health = await http.get("/live"), await http.get("/health")
    assert (live.status_code, health.status_code) == (503, 503)
    assert live.json()["status"] == health.json()["status"] == "failed"
    assert live.json()["reason"] == health.json()["error"]["message"]
    again = await http.post("/v1/completions", json={"prompt": "later"})
    assert (again.status_code, again.json()["error"]["code"]) == (503, "device_failed")


@pytest.mark.sampled(keep=2)
async def test_sigterm_with_running_and_waiting_requests(tmp_path: Path) -> None:
    """Everything admitted is finished with the text it would have had, and nothing new is taken."""
    with forked(tmp_path / "log", (*ARGUMENTS, "-np", "8")) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            # Long replies hold the slots while the others wait, however fast the machine is.
            asked = [(number, 400 if number < 8 else 40) for number in range(28)]
            expected = await asyncio.gather(*(ask(http, *one) for one in asked))
            tasks = [asyncio.create_task(ask(http, *one)) for one in asked]
            n_running = n_waiting = 0
            while n_running < 8 or n_waiting < 12:
                assert not all(one.done() for one in tasks)
                await asyncio.sleep(0.005)
                n_running, n_waiting = await n_busy(http)
            server.process.terminate()
            while (health := await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.005)
            assert health.json()["status"] == "draining"
            refused = await ask(http, 99, 4)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            found = await asyncio.gather(*tasks)
        assert server.process.wait(60) == 0
        texts = [[one.json()["choices"][0]["text"] for one in several] for several in (expected, found)]
        assert texts[0] == texts[1]
        assert not server.surprises()


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("signals", "status"), [("tt", 143), ("k", -9)], ids=["twice", "killed"])
async def test_the_second_sigterm_and_a_kill(signals: str, status: int, tmp_path: Path) -> None:
    """Both leave at once, and the port can be bound again."""
    with forked(tmp_path / "log", ARGUMENTS) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            task = asyncio.create_task(ask(http, 1, 480))
            while (await n_busy(http))[0] < 1:
                await asyncio.sleep(0.01)
            for one in signals:
                (server.process.kill if one == "k" else server.process.terminate)()
                await asyncio.sleep(0.05 if one == "t" and server.process.poll() is None else 0)
            with pytest.raises(httpx.TransportError):
                await task
        assert server.process.wait(60) == status
        _rebind(server)


def _rebind(server: Running) -> None:
    address = urlsplit(server.url)
    with socket.create_server((address.hostname or "", address.port or 0)):
        pass
