"""Asks a server's probes and metrics ten times a second, from a process of its own, until its input ends; then prints
what it saw as JSON. `benchmarks.reliability` starts it.

    python -m benchmarks.reliability_probe http://127.0.0.1:8000
"""

import json
import select
import sys
import time

import httpx

PATHS = ("/health/live", "/health/ready", "/metrics")
PAUSE_SECONDS = 0.1


def main() -> None:
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    failures: dict[str, int] = dict.fromkeys(PATHS, 0)
    with httpx.Client(base_url=sys.argv[1], timeout=10, trust_env=False) as client:
        while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            for path in PATHS:
                start = time.perf_counter()
                try:
                    is_good = client.get(path).status_code == 200
                except httpx.HTTPError:
                    is_good = False
                seconds[path].append(time.perf_counter() - start)
                failures[path] += not is_good
    result = {
        path: {
            "asked": len(times),
            "failed": failures[path],
            "p50_ms": round(1000 * sorted(times)[len(times) // 2], 2),
            "p99_ms": round(1000 * sorted(times)[len(times) * 99 // 100], 2),
            "max_ms": round(1000 * max(times), 2),
        }
        for path, times in seconds.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
