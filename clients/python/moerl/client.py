"""Calls to rollout servers and to the trainer. Errors are grpc.RpcError: code() tells what happened, details() what to do."""

from __future__ import annotations

import dataclasses
import enum
from typing import AsyncIterator, Iterator, Sequence

from moerl.channel import Tls, open_async_channel, open_channel
from moerl.text import Tokenizer
from moerl.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, trajectory_pb2


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = trajectory_pb2.FINISH_REASON_STOP
    LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
    ABORT = trajectory_pb2.FINISH_REASON_ABORT


@dataclasses.dataclass(frozen=True, order=True)
class Version:
    """Names a set of weights: the policy after `number` steps, first committed under trainer epoch `epoch`."""

    epoch: int
    number: int


@dataclasses.dataclass
class TokenChunk:
    """New tokens of sample `sample_index`; `logprobs` and `versions` have one entry a token."""

    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    prompt_logprobs: list[float]


@dataclasses.dataclass
class Completion:
    """One finished sample. `text` is set when the client has a tokenizer."""

    sample_index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[Version] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str | None = None

    def _append(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.prompt_logprobs += chunk.prompt_logprobs


class _Generation:
    """What the synchronous and the asynchronous client share: requests out, completions in."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def _request(self, prompt: Sequence[int] | str, *, num_samples: int = 1, max_new_tokens: int = 256,
                 temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                 min_p: float | None = None, stop_token_ids: Sequence[int] = (),
                 stop_sequences: Sequence[Sequence[int] | str] = (), seed: int | None = None, request_id: str = "",
                 with_prompt_logprobs: bool = False) -> rollout_pb2.GenerateRequest:
        request = rollout_pb2.GenerateRequest(
            request_id=request_id, prompt_token_ids=self._encode(prompt), num_samples=num_samples, seed=seed,
            with_prompt_logprobs=with_prompt_logprobs,
            sampling=trajectory_pb2.SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids))
        for sequence in stop_sequences:
            request.sampling.stop_sequences.add(token_ids=self._encode(sequence))
        return request

    def _encode(self, tokens: Sequence[int] | str) -> Sequence[int]:
        if not isinstance(tokens, str):
            return tokens
        if self._tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: RolloutClient(address, tokenizer=Tokenizer(path))")
        return self._tokenizer.encode(tokens)

    def _chunk(self, response: rollout_pb2.GenerateResponse) -> TokenChunk:
        span = response.chunk.tokens
        versions = [Version(run.version.epoch, run.version.number) for run in span.versions for _ in range(run.num_tokens)]
        return TokenChunk(response.sample_index, list(span.token_ids), list(span.logprobs), versions,
                          list(response.chunk.prompt_logprobs))

    def _absorb(self, completions: dict[int, Completion], response: rollout_pb2.GenerateResponse) -> None:
        completion = completions.setdefault(response.sample_index, Completion(response.sample_index))
        if response.WhichOneof("event") == "chunk":
            completion._append(self._chunk(response))
        else:
            completion.finish_reason = FinishReason(response.complete.finish_reason)

    def _finished(self, completions: dict[int, Completion]) -> list[Completion]:
        result = [completions[index] for index in sorted(completions)]
        if self._tokenizer is not None:
            for completion in result:
                completion.text = self._tokenizer.decode(completion.token_ids)
        return result


class RolloutClient(_Generation):
    """Calls one rollout server. Thread-safe; close it or use it as a context manager.

    generate() and stream() take the same keywords: num_samples, max_new_tokens, temperature (0 is greedy), top_k, top_p,
    min_p, stop_token_ids, stop_sequences, seed (the same seed gives the same tokens), request_id (for abort) and
    with_prompt_logprobs. Left out, num_samples is 1, max_new_tokens 256, and of the others the server's defaults hold.
    """

    def __init__(self, address: str, *, tls: Tls | None = None, tokenizer: Tokenizer | None = None, timeout_s: float = 600.0):
        super().__init__(tokenizer)
        self._channel = open_channel(address, tls)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends running calls and closes the connection."""
        self._channel.close()

    def generate(self, prompt: Sequence[int] | str, **sampling) -> list[Completion]:
        """All samples of a prompt (token ids, or text with a tokenizer), in sample order."""
        completions: dict[int, Completion] = {}
        for response in self._stub.Generate(self._request(prompt, **sampling), timeout=self._timeout_s):
            self._absorb(completions, response)
        return self._finished(completions)

    def stream(self, prompt: Sequence[int] | str, **sampling) -> Iterator[TokenChunk]:
        """Tokens as they are made, of all samples interleaved. Closing the iterator aborts the call."""
        call = self._stub.Generate(self._request(prompt, **sampling), timeout=self._timeout_s)
        try:
            for response in call:
                if response.WhichOneof("event") == "chunk":
                    yield self._chunk(response)
        finally:
            call.cancel()

    def abort(self, request_id: str) -> int:
        """Ends a call by its request_id; the number of samples that ended."""
        return self._stub.Abort(rollout_pb2.AbortRequest(request_id=request_id), timeout=10).num_samples_aborted

    def drain(self) -> int:
        """Stops the server from taking work; the number of samples still running."""
        return self._stub.Drain(rollout_pb2.DrainRequest(), timeout=10).num_running

    def load(self) -> rollout_pb2.GetLoadResponse:
        """Running and waiting samples, KV pages, tokens a second, weight version."""
        return self._stub.GetLoad(rollout_pb2.GetLoadRequest(), timeout=10)

    def model_info(self) -> rollout_pb2.GetModelInfoResponse:
        """Architecture, vocabulary, context, weight version, numerics fingerprint."""
        return self._stub.GetModelInfo(rollout_pb2.GetModelInfoRequest(), timeout=10)


class AsyncRolloutClient(_Generation):
    """As RolloutClient, for asyncio."""

    def __init__(self, address: str, *, tls: Tls | None = None, tokenizer: Tokenizer | None = None, timeout_s: float = 600.0):
        super().__init__(tokenizer)
        self._channel = open_async_channel(address, tls)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends running calls and closes the connection."""
        await self._channel.close()

    async def generate(self, prompt: Sequence[int] | str, **sampling) -> list[Completion]:
        """All samples of a prompt, in sample order."""
        completions: dict[int, Completion] = {}
        async for response in self._stub.Generate(self._request(prompt, **sampling), timeout=self._timeout_s):
            self._absorb(completions, response)
        return self._finished(completions)

    async def stream(self, prompt: Sequence[int] | str, **sampling) -> AsyncIterator[TokenChunk]:
        """Tokens as they are made, of all samples interleaved. Closing the iterator aborts the call."""
        call = self._stub.Generate(self._request(prompt, **sampling), timeout=self._timeout_s)
        try:
            async for response in call:
                if response.WhichOneof("event") == "chunk":
                    yield self._chunk(response)
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> int:
        """Ends a call by its request_id; the number of samples that ended."""
        return (await self._stub.Abort(rollout_pb2.AbortRequest(request_id=request_id), timeout=10)).num_samples_aborted

    async def drain(self) -> int:
        """Stops the server from taking work; the number of samples still running."""
        return (await self._stub.Drain(rollout_pb2.DrainRequest(), timeout=10)).num_running

    async def load(self) -> rollout_pb2.GetLoadResponse:
        """Running and waiting samples, KV pages, tokens a second, weight version."""
        return await self._stub.GetLoad(rollout_pb2.GetLoadRequest(), timeout=10)

    async def model_info(self) -> rollout_pb2.GetModelInfoResponse:
        """Architecture, vocabulary, context, weight version, numerics fingerprint."""
        return await self._stub.GetModelInfo(rollout_pb2.GetModelInfoRequest(), timeout=10)


class TrainerClient:
    """Calls the trainer's leader. Thread-safe; close it or use it as a context manager."""

    def __init__(self, address: str, *, tls: Tls | None = None):
        self._channel = open_channel(address, tls)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    def __enter__(self) -> TrainerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def status(self) -> trainer_pb2.GetStatusResponse:
        """Phase, step, groups by state, workers, what the run waits for."""
        return self._stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=10)

    def watch_metrics(self, after_step: int = 0) -> Iterator[trainer_pb2.StepMetrics]:
        """The rows of metrics.jsonl above `after_step`, then each new one as its step ends. Closing the iterator ends the call."""
        call = self._stub.WatchMetrics(trainer_pb2.WatchMetricsRequest(after_step=after_step))
        try:
            for response in call:
                yield response.row
        finally:
            call.cancel()

    def save_checkpoint(self, timeout_s: float = 600.0) -> trainer_pb2.SaveCheckpointResponse:
        """Writes a checkpoint at the next step boundary; returns when it is durable."""
        return self._stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=timeout_s)

    def pause(self) -> None:
        """Stops the run at the next step boundary."""
        self._stub.Pause(trainer_pb2.PauseRequest(), timeout=10)

    def resume(self) -> None:
        """Goes on after pause()."""
        self._stub.Resume(trainer_pb2.ResumeRequest(), timeout=10)


class AsyncTrainerClient:
    """As TrainerClient, for asyncio."""

    def __init__(self, address: str, *, tls: Tls | None = None):
        self._channel = open_async_channel(address, tls)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def __aenter__(self) -> AsyncTrainerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends running calls and closes the connection."""
        await self._channel.close()

    async def status(self) -> trainer_pb2.GetStatusResponse:
        """Phase, step, groups by state, workers, what the run waits for."""
        return await self._stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=10)

    async def watch_metrics(self, after_step: int = 0) -> AsyncIterator[trainer_pb2.StepMetrics]:
        """The rows of metrics.jsonl above `after_step`, then each new one as its step ends. Closing the iterator ends the call."""
        call = self._stub.WatchMetrics(trainer_pb2.WatchMetricsRequest(after_step=after_step))
        try:
            async for response in call:
                yield response.row
        finally:
            call.cancel()

    async def save_checkpoint(self, timeout_s: float = 600.0) -> trainer_pb2.SaveCheckpointResponse:
        """Writes a checkpoint at the next step boundary; returns when it is durable."""
        return await self._stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=timeout_s)

    async def pause(self) -> None:
        """Stops the run at the next step boundary."""
        await self._stub.Pause(trainer_pb2.PauseRequest(), timeout=10)

    async def resume(self) -> None:
        """Goes on after pause()."""
        await self._stub.Resume(trainer_pb2.ResumeRequest(), timeout=10)
