"""Request bodies: read within a bound, decoded strictly, refused in words. Knows no route.

Decoding runs on the event loop: 100,000 token ids take about a millisecond to skim here, and are turned into
integers in slices (`decode_ids`) with other tasks let in between.
"""

import asyncio
import re
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from twinjet.core.errors import InvalidRequest
from twinjet.server.errors import BodyTooLarge

T = TypeVar("T")

_SLICE_BYTES = 32 << 10
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class ClientGone(Exception):
    """The client went away before its request was whole."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: by its announced length, or as soon as more than `limit_bytes` have come.
        ClientGone: there is nobody left to answer.
    """
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes; the limit is {limit_bytes}. Send less")
    receive: Receive = request.receive
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes, which is the limit. Send less")
        if not message.get("more_body", False):
            return bytes(body)


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes | msgspec.Raw, inside: str = "") -> T:
    """Decode; `inside` is the field that `body` is the value of, for error messages."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain_mismatch(str(error), inside) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send plain values", inside or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain_malformed(str(error), bytes(body), inside) from None


def _explain_mismatch(text: str, inside: str) -> InvalidRequest:
    match = _MESSAGE.fullmatch(text)
    what, where = (match["what"], match["where"]) if match else (text, None)
    path = _join(inside, where or "")
    if unknown := _UNKNOWN.fullmatch(what):
        name = _join(path, unknown["name"][:100])
        return InvalidRequest(f"unknown field `{name}`; remove it", name)
    if missing := _MISSING.fullmatch(what):
        name = _join(path, missing["name"])
        return InvalidRequest(f"the field `{name}` is missing; send it", name)
    what = what[:1].lower() + what[1:]
    if path:
        return InvalidRequest(f"`{path}`: {what}", path)
    return InvalidRequest(f"the body must be a JSON object: {what}")


def _explain_malformed(text: str, body: bytes, inside: str) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("the body is empty; send a JSON object")
    try:
        body.decode()
    except UnicodeDecodeError:
        return InvalidRequest("the body is not UTF-8; send JSON in UTF-8", inside or None)
    hint = ""
    if _SURROGATE.search(body):
        hint = "; a string has a surrogate escape such as \\ud800 without its other half"
    where = f"`{inside}`" if inside else "the body"
    text = text.removeprefix("JSON is malformed: ")
    return InvalidRequest(f"{where} is not valid JSON: {text[:1].lower()}{text[1:]}{hint}", inside or None)


def _join(path: str, name: str) -> str:
    if not path or not name or name.startswith("["):
        return path + name
    return f"{path}.{name}"


def ids_decoder(vocab_size: int) -> "msgspec.json.Decoder[list[int]]":
    """A decoder of token ids that refuses any outside the vocabulary."""
    return msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]])


async def decode_ids(decoder: "msgspec.json.Decoder[list[int]]", raw: bytes, inside: str) -> list[int]:
    """Decode a flat JSON list of ids, letting other tasks run between slices of it.

    `raw` must be well-formed JSON that begins with `[`. A slice ends at a comma, and in a flat list of
    integers every comma parts two of them; in any other list some slice fails to decode.
    """
    if len(raw) <= _SLICE_BYTES:
        return decode_body(decoder, raw, inside)
    end = raw.rindex(b"]")
    ids: list[int] = []
    start = raw.index(b"[") + 1
    while start < end:
        stop = raw.find(b",", start + _SLICE_BYTES, end)
        stop = end if stop < 0 else stop
        try:
            ids += decoder.decode(b"[" + raw[start:stop] + b"]")
        except msgspec.DecodeError:
            # Rare, and the message should count from the list's start: decode it whole.
            decode_body(decoder, raw, inside)
            raise InvalidRequest(f"`{inside}` must be a list of token ids", inside) from None
        start = stop + 1
        await asyncio.sleep(0)
    return ids
