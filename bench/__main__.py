"""`python -m bench NAME [--quick] [--json -]`: run one benchmark; its last line is one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "model": "write the benchmark checkpoint (random Qwen3-MoE, about 397 M parameters)",
    "serve": "the real server under streaming HTTP clients, with every text checked",
    "topk": "decode time and KL of the next-token distribution with fewer experts per token",
    "dispatch": "step time through two expert groups against one process and plain transformers",
}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import os

    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=["list", *BENCHMARKS], help="which benchmark")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: checks the benchmark, not the code"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result there; '-' prints nothing else")
    arguments = parser.parse_args(argv)
    if arguments.name == "list":
        for name, about in BENCHMARKS.items():
            print(f"{name:10} {about}")
        return 0
    quiet = arguments.json == "-"
    module = importlib.import_module(f"bench.{arguments.name}")
    result = module.run(quick=arguments.quick, say=_silent if quiet else _say)
    line = json.dumps({"bench": arguments.name, "quick": arguments.quick, "machine": machine(), **result})
    print(line)
    if arguments.json and not quiet:
        Path(arguments.json).write_text(line + "\n", encoding="utf-8")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    sys.exit(main())
