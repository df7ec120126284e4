"""A client of `executor serve`: `InferenceClient`, and `AsyncInferenceClient` for asyncio. See README.md."""

from executor.client.aio import AsyncGeneration, AsyncInferenceClient
from executor.client.connection import ConnectionOptions
from executor.client.sync import Generation, InferenceClient
from executor.serving.events import Accepted, Delta, Event, Finished, StopMatch, TokenLogProb
from executor.serving.generation_request import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

__all__ = [
    "Accepted",
    "AsyncGeneration",
    "AsyncInferenceClient",
    "ChatMessage",
    "ChatPrompt",
    "ConnectionOptions",
    "Delta",
    "Event",
    "Finished",
    "Generation",
    "GenerationRequest",
    "InferenceClient",
    "StopMatch",
    "TextPrompt",
    "TokenLogProb",
    "TokenPrompt",
]
