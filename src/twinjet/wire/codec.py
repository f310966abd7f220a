"""Messages to bytes and back. Anything that does not fit the schema is a `WireError`, never a guess."""

import msgspec

from twinjet.core.errors import EngineError
from twinjet.wire.messages import MAX_MESSAGE_BYTES, Message, ToEngine, ToOrchestrator


class WireError(EngineError):
    """Bytes that are no message of ours."""


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_orchestrator = msgspec.msgpack.Decoder(ToOrchestrator)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises: WireError."""
    return _decode(_to_engine, data)


def decode_to_orchestrator(data: bytes) -> ToOrchestrator:
    """Raises: WireError."""
    return _decode(_to_orchestrator, data)


def _decode(decoder, data: bytes):
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of this version: {error}") from None
