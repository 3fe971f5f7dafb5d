"""The standard health protocol (grpc.health.v1): "" is alive, "ready" accepts work."""

from __future__ import annotations

import threading

import grpc

# The two messages are one field each; written and read here so that the package needs no generated copy of a public proto,
# which would clash with grpcio-health-checking where both are installed.
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


def _decode_service(data: bytes) -> str:
    # Field 1, length-delimited: 0x0a, length (under 128 for any name there is), bytes.
    if not data:
        return ""
    if data[0] != 0x0A or len(data) < 2 or len(data) != 2 + data[1]:
        raise ValueError("not a HealthCheckRequest")
    return data[2:].decode()


def _encode_status(status: int) -> bytes:
    return bytes((0x08, status))


class HealthServicer:
    """Answers Check and Watch. Thread-safe."""

    def __init__(self, watchers_max: int) -> None:
        self._status = {"": _SERVING, "ready": _SERVING}
        self._changed = threading.Condition()
        self._watchers_max = watchers_max
        self._num_watchers = 0

    def add_to(self, server: grpc.Server) -> None:
        """Registers the service."""
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, _decode_service, _encode_status),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, _decode_service, _encode_status),
        }),))

    def set_not_ready(self) -> None:
        """"ready" turns NOT_SERVING for good."""
        with self._changed:
            self._status["ready"] = _NOT_SERVING
            self._changed.notify_all()

    def _check(self, service: str, context: grpc.ServicerContext) -> int:
        status = self._status.get(service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{service}"; there are "" and "ready"')
        return status

    def _watch(self, service: str, context: grpc.ServicerContext):
        # A watcher holds a thread of the pool: bounded, so that calls always find one.
        with self._changed:
            if self._num_watchers == self._watchers_max:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._watchers_max} health watchers at most; use Check")
            self._num_watchers += 1
        try:
            last = None
            while context.is_active():
                with self._changed:
                    status = self._status.get(service, _SERVICE_UNKNOWN)
                    if status == last:
                        self._changed.wait(timeout=1.0)
                        continue
                last = status
                yield status
        finally:
            with self._changed:
                self._num_watchers -= 1
