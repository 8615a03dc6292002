"""How much an engine process grows from its imports to a full KV cache.

`python -m bench.growth` is a process that has imported an engine's code and tells its own memory.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from bench.worker import Worker
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe

ALLOWANCE = 300_000_000
LOOK_S = 0.05
TOKENS = 64
"""So many that the first prompt's sequence still runs when the last prompt is computed."""
MOST = 64
"""As many as run at once."""
FIELDS = {"anonymous": "RssAnon", "shared": "RssShmem"}


def memory(pid: int | str) -> dict[str, int]:
    """Bytes in memory: anonymous, and shared (the lanes' rings). Files' pages belong to the kernel's cache."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return {name: int(status[field].split()[0]) * 1024 for name, field in FIELDS.items()}


class Growth:
    """Memory of an engine process, less that of a process that has only imported its code."""

    def __init__(self, engine: psutil.Process, imported: dict[str, int], path: Path, kv_bytes: int) -> None:
        """
        Args:
            imported: memory of a process that has imported the engine's code, which is what this module's is.
            path: the checkpoint's folder; its attention keeps keys and values in fp32.
        """
        self._engine, self._kv_bytes = engine, kv_bytes
        checkpoint = Checkpoint.open(path)
        self._moe, config = describe(checkpoint), checkpoint.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
        self._imported = sum(imported.values())
        self._before = memory(engine.pid)
        self._most = self._before

    def fill(self, clients: Worker) -> None:
        """Have prompts of twice the KV limit in the engine at once; the most it takes meanwhile is kept."""
        length = min(self._moe.max_context - TOKENS, 1024)
        count = min(max(2 * self._kv_bytes // (length * self._per_token), 2), MOST)
        done = threading.Event()

        def watch() -> None:
            while not done.wait(LOOK_S):
                now = memory(self._engine.pid)
                if sum(now.values()) > sum(self._most.values()):
                    self._most = now

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            prompts = [[(7 * n + k) % self._moe.vocab_size for k in range(length)] for n in range(count)]
            answers = clients.ask(prompts=prompts, tokens=TOKENS, concurrency=count)["answers"]
        finally:
            done.set()
            thread.join()
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise RuntimeError(f"{len(errors)} long requests failed: {errors[0]}")

    def line(self) -> str:
        """For people."""
        out = self.result()
        return (
            f"the router grew by {out['router_growth_bytes'] / 1e6:.0f} MB"
            f" (limit {out['router_growth_limit_bytes'] / 1e6:.0f} MB)"
        )

    def result(self) -> dict[str, Any]:
        """Bytes."""
        return {
            "router_growth_bytes": sum(self._most.values()) - self._imported,
            "router_growth_limit_bytes": self._moe.router_bytes + self._kv_bytes + ALLOWANCE,
            "router_growth": {
                "non_expert_weights": self._moe.router_bytes,
                "kv_limit": self._kv_bytes,
                "imported": self._imported,
                "before_filling": self._before,
                "most": self._most,
            },
        }


def main() -> None:
    """Serve jobs, which have no fields, until the standard input ends."""
    importlib.import_module("raymoe.engine.process")
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(memory("self")), flush=True)


if __name__ == "__main__":
    main()
