"""What `raymoe demo` shows of a running server: one streamed answer, and which group computed how much."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import httpx

from raymoe.actors import state
from raymoe.actors.link import controller_status
from raymoe.actors.server import url
from raymoe.actors.tls import trust
from raymoe.actors.watch import PING_S
from raymoe.errors import ClusterError

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 48


def show(record: state.ServerRecord, write: Callable[[str], None]) -> None:
    """Ask one question and write the answer and each group's part of the work.

    Raises:
        ClusterError: the server answered with an error.
    """
    write(f"> {QUESTION}")
    write(ask(url(record), record.model, QUESTION, record.tls_cert))
    # The controller's numbers are as old as its last ping.
    time.sleep(2 * PING_S)
    status = controller_status(record.app)
    for group in status["groups"] if status else []:
        write(f"{group['name']} (process {group['pid']}) computed {group['stats']['pairs']} pairs")


def ask(base: str, model: str, question: str, tls_cert: str | None = None) -> str:
    """A greedy streamed chat completion, put together."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text = []
    where, verify = f"{base}/v1/chat/completions", trust(tls_cert)
    with httpx.stream("POST", where, json=body, timeout=120, verify=verify) as response:
        if response.status_code != 200:
            raise ClusterError(f"the server answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ClusterError(f"the answer broke off: {event['error']['message']}")
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(text)


def curl_line(record: state.ServerRecord, keys: bool = False) -> str:
    """A request to paste into another terminal, with a place for a key if one is needed."""
    body = {
        "model": record.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    trusted = f"--cacert {record.tls_cert} " if record.tls_cert else ""
    key = "-H 'Authorization: Bearer KEY' " if keys else ""
    return (
        f"curl {trusted}{url(record)}/v1/chat/completions {key}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )
