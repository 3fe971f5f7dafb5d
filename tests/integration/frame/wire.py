"""Just enough protobuf and gRPC to speak to a server without generated code."""

import grpc


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(number, value):
    """A string or bytes field."""
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(data):
    """(number, value) of each field: int for varints, bytes for length-delimited ones."""
    position = 0

    def read_varint():
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        tag = read_varint()
        if tag & 7 == 0:
            yield tag >> 3, read_varint()
        elif tag & 7 == 2:
            size = read_varint()
            yield tag >> 3, data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {tag & 7}")


SERVING, NOT_SERVING = 1, 2


def _status(response):
    return dict(fields(response)).get(1, 0)


def check_health(channel, service="", timeout=5):
    call = channel.unary_unary("/grpc.health.v1.Health/Check")
    return _status(call(text(1, service), timeout=timeout))


def watch_health(channel, service):
    """Yields each status the server reports."""
    for response in channel.unary_stream("/grpc.health.v1.Health/Watch")(text(1, service)):
        yield _status(response)


def list_services(channel):
    """Names from server reflection: ServerReflectionRequest.list_services = 7, answered in field 6."""
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    response = next(call(iter([text(7, "*")]), timeout=5))
    listing = dict(fields(response))[6]
    return sorted(dict(fields(service))[1].decode() for number, service in fields(listing) if number == 1)


def error_details(error):
    """[(type name, fields)] of the google.rpc.Status in a call's trailing metadata."""
    metadata = dict(error.trailing_metadata())
    status = metadata.get("grpc-status-details-bin", b"")
    details = []
    for number, value in fields(status):
        if number == 3:
            any_fields = dict(fields(value))
            details.append((any_fields[1].decode().rsplit("/")[-1], list(fields(any_fields.get(2, b"")))))
    return details


def code_of(call):
    """The status code a call ends with; OK when it returns."""
    try:
        call()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
