"""Requests to a real server on the demo pair and looks at its slots, for tests of faults."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.process import DEMO

ARGUMENTS = (*DEMO, "--threads", "1", "--ctx-size", "512", "--spec-type", "suffix,draft-model")


def body(number: int, n_tokens: int, **fields: object) -> dict[str, object]:
    prompt = f"def f{number}(x):\n    return"
    return {"prompt": prompt, "max_tokens": n_tokens, "seed": number, "ignore_eos": True, **fields}


async def ask(http: httpx.AsyncClient, number: int, n_tokens: int, **fields: object) -> httpx.Response:
    return await http.post("/v1/completions", json=body(number, n_tokens, **fields))


async def n_busy(http: httpx.AsyncClient) -> tuple[int, int]:
    """(slots that work, requests that wait)"""
    engine = (await http.get("/props")).json()["engine"]
    return sum(slot["is_processing"] for slot in (await http.get("/slots")).json()), engine["n_waiting"]


async def n_generated(http: httpx.AsyncClient) -> int:
    return (await http.get("/props")).json()["engine"]["n_completion_tokens"]


async def freed(http: httpx.AsyncClient, n_busy_else: int) -> None:
    """Wait until only so many slots work, and hold pages; a request that was left may arrive between two looks."""
    ends = time.monotonic() + 60
    while (await n_busy(http))[0] > n_busy_else or (not n_busy_else and await n_pages_held(http) > 0):
        assert time.monotonic() < ends
        await asyncio.sleep(0.005)


async def n_pages_held(http: httpx.AsyncClient) -> int:
    return (await http.get("/props")).json()["engine"]["n_pages_held"]
