"""Client and environment SDK of moerl."""

from moerl.channel import Tls
from moerl.client import (
    AsyncRolloutClient, AsyncTrainerClient, Completion, FinishReason, RolloutClient, TokenChunk, TrainerClient, Version,
)
from moerl.environment import Environment, Step, Task, Turn, serve
from moerl.text import Tokenizer

__all__ = [
    "AsyncRolloutClient", "AsyncTrainerClient", "Completion", "Environment", "FinishReason", "RolloutClient", "Step", "Task", "Tls",
    "TokenChunk", "Tokenizer", "TrainerClient", "Turn", "Version", "serve",
]
