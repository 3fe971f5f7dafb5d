"""Channels to moerl services: TLS from files, keepalive that the servers accept, bounded messages."""

from __future__ import annotations

import dataclasses
import pathlib

import grpc

MESSAGE_BYTES_MAX = 8 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # The servers allow a ping every five seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files of a mutual-TLS identity: the authority that signed the server, and one's own certificate and key."""

    ca_file: str
    certificate_file: str
    key_file: str

    def credentials(self) -> grpc.ChannelCredentials:
        """For calling; OSError names a file that cannot be read."""
        return grpc.ssl_channel_credentials(*map(_read, (self.ca_file, self.key_file, self.certificate_file)))

    def server_credentials(self) -> grpc.ServerCredentials:
        """For serving: callers must show a certificate of the same authority."""
        key, certificate = _read(self.key_file), _read(self.certificate_file)
        return grpc.ssl_server_credentials([(key, certificate)], _read(self.ca_file), require_client_auth=True)


def _read(file: str) -> bytes:
    return pathlib.Path(file).read_bytes()


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel to `host:port`; plain text without `tls`."""
    if tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), options=OPTIONS)


def open_async_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """As open_channel, for asyncio."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), options=OPTIONS)
