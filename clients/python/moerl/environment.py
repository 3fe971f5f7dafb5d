"""The environment SDK: write a reward or a multi-turn environment in Python and serve it to rollout servers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import math
import signal
import threading
from typing import Sequence

import grpc

from moerl.channel import MESSAGE_BYTES_MAX, Tls
from moerl.health import HealthServicer
from moerl.text import Tokenizer
from moerl.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

log = logging.getLogger("moerl.environment")

WATCHERS_MAX = 4  # of health; fewer where there are fewer threads, so that a call always finds one
WAITING_CALLS_MAX = 1024  # sixteen rollout servers with environment.calls_max at its default


@dataclasses.dataclass(frozen=True)
class Task:
    """A task instance. `payload` is what the prompt file's "answer" said, as bytes."""

    name: str
    payload: bytes

    @property
    def answer(self) -> str:
        """The payload as text."""
        return self.payload.decode()

    def json(self) -> object:
        """The payload parsed as JSON, for answers that are more than a string."""
        return json.loads(self.payload)


@dataclasses.dataclass(frozen=True)
class Turn:
    """Tokens of one side. `is_action` tells the policy's turns; `is_truncated` that one ended by its length."""

    token_ids: Sequence[int]
    is_action: bool
    is_truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """Answer to a turn: its reward, and what the policy sees next unless it is the last."""

    reward: float
    is_done: bool = True
    observation: Sequence[int] = ()


class Environment:
    """Judges what the policy answers. Override reward() for a single turn, step() for more.

    Calls come from several threads at once. Answers must depend on the arguments alone: a call can be repeated, on another
    process too. An exception is a verifier error; the group is dropped with its text as the reason.
    """

    tokenizer: Tokenizer | None = None

    @classmethod
    def with_tokenizer(cls, path: str) -> Environment:
        """An instance that reads and writes text with the tokenizer at `path` (tokenizer.json or its directory)."""
        environment = cls()
        environment.tokenizer = Tokenizer(path)
        return environment

    def prompt(self, task: Task, text: str) -> Sequence[int]:
        """Token ids of a prompt given as text in the prompt file. Override to add a chat template."""
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: use with_tokenizer(path), or write token_ids in the prompt file")
        return self.tokenizer.encode(text)

    def reward(self, task: Task, prompt: str | Sequence[int], completion: str | Sequence[int]) -> float:
        """Reward of a single-turn completion; text where there is a tokenizer, token ids otherwise."""
        raise NotImplementedError("override reward() or step()")

    def step(self, task: Task, transcript: Sequence[Turn]) -> Step:
        """Judges the last turn of `transcript`: the prompt, then answers and observations alternating."""
        prompt, completion = transcript[0].token_ids, transcript[-1].token_ids
        if self.tokenizer is not None:
            return Step(self.reward(task, self.tokenizer.decode(prompt), self.tokenizer.decode(completion)))
        return Step(self.reward(task, prompt, completion))


class _Servicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Proto in, proto out. Holds no episodes: every step carries its transcript."""

    def __init__(self, environment: Environment):
        self._environment = environment

    def Reset(self, request, context):  # noqa: N802 (gRPC's name)
        task = Task(request.task.name, request.task.payload)
        try:
            observation = list(self._environment.prompt(task, request.text))
        except Exception as error:  # noqa: BLE001 (whatever user code raises is the verifier's error)
            self._abort(context, "prompt", error)
        return environment_pb2.ResetResponse(episode_id=f"{request.group_id}-{request.sample_index}",
                                             observation_token_ids=observation)

    def Step(self, request, context):  # noqa: N802
        task = Task(request.task.name, request.task.payload)
        truncated = trajectory_pb2.FINISH_REASON_LENGTH
        transcript = [Turn(tuple(t.token_ids), t.is_action, t.finish_reason == truncated) for t in request.transcript]
        try:
            step = self._environment.step(task, transcript)
            reward = float(step.reward)
        except Exception as error:  # noqa: BLE001
            self._abort(context, "step", error)
        if not math.isfinite(reward):
            log.warning("reward %r of task %s is not finite; the group will be dropped", reward, task.name)
        return environment_pb2.StepResponse(observation_token_ids=step.observation, reward=reward, is_done=step.is_done)

    @staticmethod
    def _abort(context, call: str, error: Exception) -> None:
        log.exception("%s failed", call)
        context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:1024])


def serve(environment: Environment, address: str = "127.0.0.1:7300", *, tls: Tls | None = None, num_threads: int = 8,
          grace_s: float = 20.0) -> None:
    """Serves until SIGTERM or SIGINT, then refuses new calls, finishes running ones within `grace_s`, and returns.

    Health: "" alive, "ready" accepts work. At most `num_threads` calls run at once and WAITING_CALLS_MAX wait; more are
    answered RESOURCE_EXHAUSTED, which rollout servers take as busy and try again. Raises RuntimeError if the
    address cannot be bound. To be called on the main thread.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    health = HealthServicer(min(WATCHERS_MAX, num_threads - 1))
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(num_threads),
                         maximum_concurrent_rpcs=num_threads + WAITING_CALLS_MAX,
                         options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                                  ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                                  # Rollout servers ping between calls too, to notice a lost machine.
                                  ("grpc.keepalive_permit_without_calls", 1)))
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(_Servicer(environment), server)
    health.add_to(server)
    bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.server_credentials())
    if bound == 0:
        raise RuntimeError(f"cannot listen at {address}: is the port taken?")
    server.start()
    print(f"moerl environment {type(environment).__name__} serves at {address}", flush=True)

    stop.wait()
    health.set_not_ready()
    server.stop(grace_s).wait()
