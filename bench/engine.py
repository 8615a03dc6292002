"""`python -m bench.engine FOLDER`: the engine's loop with two expert group processes, and nothing around it.

No Ray, no HTTP, no tokenizer, no streams: what `bench serve` compares the whole server with. A job is one of
`bench.clients` with `sleep_s` added to each step; the answer has `seconds` and the `tokens` of each prompt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.group import TOKEN, expert_groups
from bench.router import THREADS
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.config import Settings
from raymoe.engine.loop import Engine
from raymoe.engine.messages import GenerateRequest, SamplingParams
from raymoe.engine.scheduler import Limits
from raymoe.errors import RaymoeError
from raymoe.lanes.hello import Hello
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.context import run_experts


def run(
    engine: Engine, prompts: list[list[int]], tokens: int, concurrency: int, sleep_s: float = 0.0
) -> dict[str, Any]:
    """All prompts, `concurrency` at a time."""
    got: dict[str, list[int]] = {}
    waiting = iter(enumerate(prompts))
    open_requests = 0
    started = time.monotonic()
    while True:
        while open_requests < concurrency and (job := next(waiting, None)) is not None:
            name = str(job[0])
            engine.submit(GenerateRequest(name, tuple(job[1]), tokens, SamplingParams(temperature=0)))
            got[name] = []
            open_requests += 1
        if not open_requests:
            break
        for name, what in engine.step():
            if isinstance(what, RaymoeError):
                raise what
            got[name] += what.token_ids
            open_requests -= what.finish_reason is not None
        time.sleep(sleep_s)
    seconds = time.monotonic() - started
    return {"seconds": seconds, "tokens": [got[str(number)] for number in range(len(prompts))]}


def main(folder: str) -> None:
    """Serve jobs until the standard input ends."""
    path = Path(folder)
    checkpoint = Checkpoint.open(path)
    torch.set_num_threads(THREADS)
    loader = ExpertLoader(checkpoint)
    model = load_router(checkpoint, run_experts, attention=ATTENTION)
    hello = Hello(TOKEN, checkpoint.fingerprint, "float32", loader.model.hidden_size)
    settings = Settings().router
    with expert_groups(path, loader, hello) as dispatcher:
        limits = Limits(
            step_tokens=settings.step_tokens,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            kv_tokens=1 << 30,
        )
        engine = Engine(model, dispatcher, limits, replace_timeout_s=60)
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(run(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
