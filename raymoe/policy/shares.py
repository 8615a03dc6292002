"""Which client is served next: the one that has had the least.

The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv 2401.00588), with every computed row counted alike. Who comes back after a pause starts level with the least
served of those present, so nobody saves up service for later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Shares:
    """Rows that each client has had, comparable among those that are present."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def join(self, client: str, present: Collection[str]) -> None:
        """A request of `client` comes, while `present` are the clients that have requests already."""
        if client in present:
            return
        if not present:
            # Nobody has waited for anybody: what was before doesn't matter any more.
            self._rows.clear()
        floor = min((self._rows[other] for other in present), default=0)
        self._rows[client] = max(self._rows.get(client, 0), floor)

    def charge(self, client: str, rows: int) -> None:
        """`rows` rows of a step go to `client`, who has joined."""
        self._rows[client] += rows

    def least(self, clients: Iterable[str]) -> str:
        """Who of these, of whom there is at least one, has had the least; the first of equals."""
        return min(clients, key=self._rows.__getitem__)
