"""`python -m bench.clients URL`: streaming HTTP clients, in a process of their own so as not to delay the bench.

A job has `prompts` (token ids), `tokens` (how many each is to get) and `concurrency`: so many clients, each of
which sends its next request when the last has ended. The answer has `seconds` and for each prompt its `text`,
`error` (None: good), `sent` and the `times` and `counts` (tokens) of its chunks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx

TIMEOUT_S = 300.0


async def run(url: str, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
    """All prompts, `concurrency` at a time."""
    answers: list[dict[str, Any]] = [{} for _ in prompts]
    waiting = iter(range(len(prompts)))

    async def client(http: httpx.AsyncClient) -> None:
        for number in waiting:
            answers[number] = await ask(http, prompts[number], tokens)

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        started = time.monotonic()
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
        return {"seconds": time.monotonic() - started, "answers": answers}


async def ask(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One greedy streamed completion of exactly `tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    answer: dict[str, Any] = {"text": "", "error": None, "sent": time.monotonic(), "times": [], "counts": []}
    finish = None
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200 or "error" in line[:20]:
                    answer["error"] = f"{response.status_code}: {line[:500]}"
                elif line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    finish = choice["finish_reason"] or finish
                    if choice["text"]:
                        answer["times"].append(time.monotonic())
                        answer["counts"].append(len(choice["text"].split()))
                        answer["text"] += choice["text"]
    except httpx.HTTPError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    if answer["error"] is None and (finish != "length" or sum(answer["counts"]) != tokens):
        answer["error"] = f"{sum(answer['counts'])} of {tokens} tokens, finish_reason {finish}"
    return answer


def main(url: str) -> None:
    """Serve jobs until the standard input ends."""
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(url, **json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
