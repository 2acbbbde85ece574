"""What choosing a replica costs the ingress, up to 256 of them: `python -m tests.ray.router_cost`. Needs no Ray.

Conversations come back to the replicas that they were at, new ones come in between; requests per second that one
ingress could route are printed with the time of one.
"""

from __future__ import annotations

import random
import statistics
import time

from slipstream.engine.api import Request
from slipstream.server.cluster.affinity import Affinity

N_REQUESTS = 400
REPLICAS, CHARACTERS = (3, 16, 64, 256), (1_000, 8_000, 64_000)


def microseconds(n_replicas: int, n_chars: int) -> float:
    """The median of a choice and its note."""
    draw = random.Random(0)
    known = Affinity(8)
    loads = {f"replica-{i:04d}": draw.randrange(8) for i in range(n_replicas)}
    talks = [f"{i} " + "".join(draw.choices("abcdefgh ", k=n_chars)) for i in range(20)]
    found = []
    for i in range(N_REQUESTS):
        request = Request(id=str(i), prompt=draw.choice(talks) + str(i))
        started = time.perf_counter()
        known.note(request, known.choose(request, loads)[0])
        found.append(time.perf_counter() - started)
    return 1e6 * statistics.median(found)


def main() -> None:
    print("microseconds a request | " + " | ".join(f"{n} characters" for n in CHARACTERS))
    for n_replicas in REPLICAS:
        print(
            f"{n_replicas} replicas | " + " | ".join(f"{microseconds(n_replicas, n):.0f}" for n in CHARACTERS)
        )


if __name__ == "__main__":
    main()
