"""`python -m bench.pause`: a clean pause, over a bare abort-and-read of the same requests.

The engine holds its generations until they are aborted, then answers with 128 partial tokens each. Ours is the time of
`POST /v1/pause`: every answer parsed, recorded, handed back, and the engine's own count seen at 0. The
floor is one abort on a warm connection and every answer read and parsed, by a bare client.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from statistics import median

import orjson

from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import Served

CASES = (256, 1024, 4096)
BOUND = 1.5
ROUNDS = 7
POLL_S = 0.02
"""Between two looks at another process, which sends no event."""
FILL_TIMEOUT_S = 60.0
MAX_TOKENS = 100_000
"""Every round cuts the same answers again, 128 tokens further on: none may ever be whole."""


def ours(served: Served, engine_url: str, in_flight: int) -> float:
    """Seconds of one clean pause with `in_flight` requests under way, from the moment the engine counts them all."""
    served.call("POST", "/v1/resume", {})
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while at_engine(engine_url) < in_flight or running(served) < in_flight:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{running(served)} of {in_flight} requests are under way")
        time.sleep(POLL_S)
    start = time.perf_counter()
    report = orjson.loads(served.call("POST", "/v1/pause", {"deadline_s": 30}))
    elapsed_s = time.perf_counter() - start
    stopped = sum(worker["answered"] for worker in report["workers"].values())
    if not report["clean"] or stopped != in_flight:
        raise RuntimeError(f"not a clean pause of {in_flight}: {report}")
    return elapsed_s


def running(served: Served) -> int:
    """Requests under way, by the service's count."""
    return int(orjson.loads(served.call("GET", "/v1/status"))["lanes"]["train"]["in_flight"])


def at_engine(engine_url: str) -> int:
    """Requests under way, by the engine's count: what the floor waits for as well."""
    with urllib.request.urlopen(f"{engine_url}/v1/loads", timeout=FILL_TIMEOUT_S) as response:  # noqa: S310 - our child
        return int(orjson.loads(response.read())["loads"][0]["num_running_reqs"])


def floor(engine_url: str, count: int) -> float:
    """Seconds of a bare abort-and-read."""
    with Child("bench.floor", "--url", engine_url, "--abort-and-read", count, ready=None) as child:
        return float(child.read_json(60.0)["elapsed_s"])


def run(case: int, rounds: int) -> Point:
    """Measure one case, by turns; the first pause opens the connections and is not counted."""
    with Child("bench.canned", "--port", 0, "--hold") as engine:
        url = f"http://127.0.0.1:{engine.ready_line[0]}"
        with Served([url], case, MAX_TOKENS) as served:
            ours(served, url, case)
            pairs = []
            for number in range(rounds):
                pair = ours(served, url, case), floor(url, case)
                pairs.append(pair)
                progress(
                    f"{case}: round {number + 1} of {rounds}: {1000 * pair[0]:.0f} ms over {1000 * pair[1]:.0f} ms"
                )
    return Point(str(case), median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), BOUND)


def main() -> int:
    """Run all cases and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cases", type=int, nargs="*", default=list(CASES))
    options = parser.parse_args()
    raise_open_files()
    return 0 if print_report("pause", [run(case, options.rounds) for case in options.cases]) else 1


if __name__ == "__main__":
    sys.exit(main())
