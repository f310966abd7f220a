"""An engine process that misbehaves on purpose, in ways that a real worker can hardly be brought to.

`config.model_path` names the script. Only the first incarnation follows it; later ones are sound. Tokens are those
of `tests.fakes.expected_tokens`, one sequence after the other.
"""

import os
import struct
import sys
import time

import zmq

from tests.fakes import FAKE_VOCAB, blank_stats, expected_tokens
from twinjet.wire.codec import decode_to_engine, encode
from twinjet.wire.launch import identity, load_launch
from twinjet.wire.messages import (
    Failed,
    Message,
    PagesExported,
    Progress,
    Ready,
    SequenceEnded,
    Shutdown,
    StepTokens,
    Submit,
)

STATS = blank_stats()


class ScriptedWorker:
    def __init__(self) -> None:
        self.launch = load_launch(sys.stdin.buffer.readline())
        self.script = self.launch.config.model_path if self.launch.incarnation == 1 else "sound"
        self.context = zmq.Context()
        self.socket = self.connect(identity(self.launch.engine_id, self.launch.incarnation))

    def connect(self, name: bytes) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        socket.connect(self.launch.endpoint)
        return socket

    def send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def run(self) -> None:
        limits = self.launch.config.scheduler
        if self.script == "never ready":
            self.send(Progress("load", 1, 2))
            time.sleep(600)
        if self.script == "exits at start":
            sys.exit(3)
        self.send(Ready(os.getpid(), FAKE_VOCAB, limits.context, limits.max_streams, 9, 4, 9, "scripted", "float32", 0))
        while True:
            if self.script != "silent":
                self.send(STATS)
            if not self.socket.poll(200):
                continue
            message = decode_to_engine(self.socket.recv())
            if isinstance(message, Shutdown) and self.script != "deaf":
                return
            if isinstance(message, Submit) and self.script not in ("silent", "stuck"):
                self.generate(message)

    def generate(self, submit: Submit) -> None:
        known = [token for (token,) in struct.iter_unpack("<i", submit.token_ids)]
        tokens = expected_tokens(known, submit.max_new_tokens)
        for i, token in enumerate(tokens):
            if i == 3:
                self.misbehave(submit.sequence_id)
            finish = "length" if i == len(tokens) - 1 else ""
            self.send(StepTokens(i, [submit.sequence_id], [token], [finish]))

    def misbehave(self, sequence_id: int) -> None:
        match self.script:
            case "garbled":
                self.socket.send(b"\xc1 not msgpack")
            case "two frames":
                self.socket.send_multipart([encode(STATS), b""])
            case "unequal columns":
                self.send(StepTokens(9, [sequence_id], [1, 2], [""]))
            case "token outside the vocabulary":
                self.send(StepTokens(9, [sequence_id], [FAKE_VOCAB], [""]))
            case "export unasked":
                self.send(PagesExported(sequence_id, []))
            case "drops the sequence":
                self.send(SequenceEnded(sequence_id, "cancelled"))
            case "says that it failed, and stays":
                self.send(Failed("StepFailed", "the device is gone"))
                time.sleep(600)
            case "strangers":
                for name in (b"1.1", b"0.2", b"0.0", b"nobody"):
                    self.connect(name).send(encode(StepTokens(9, [sequence_id], [1], ["stop"])))
                time.sleep(0.3)


if __name__ == "__main__":
    ScriptedWorker().run()
