"""Messages to bytes and back. Anything that does not fit the schema is a `WireError`, never a guess."""

from typing import TypeVar

import msgspec

from twinjet.core.errors import EngineError
from twinjet.wire.messages import MAX_MESSAGE_BYTES, Message, ToEngine, ToOrchestrator

T = TypeVar("T")


class WireError(EngineError):
    """Bytes that are no message of ours."""


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_orchestrator = msgspec.msgpack.Decoder(ToOrchestrator)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises: WireError."""
    return _decode(_to_engine, frame)


def decode_to_orchestrator(frame: bytes) -> ToOrchestrator:
    """Raises: WireError."""
    return _decode(_to_orchestrator, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of this version: {error}") from None
