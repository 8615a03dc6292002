"""A client of raymoe for Python programs, over HTTP or gRPC, sync or async. Needs neither Ray nor torch."""

from raymoe.client.answers import Answer, Choice, Usage
from raymoe.client.client import AsyncClient, Client
from raymoe.client.options import ChatOptions, GenerateOptions, Message

__all__ = ["Answer", "AsyncClient", "ChatOptions", "Choice", "Client", "GenerateOptions", "Message", "Usage"]
