"""Turning bodies into jobs leaves the event loop, and other requests, room to go on."""

import asyncio
import json
import threading

import pytest

from tests.server.fakes import ByteTokenizer, FakeOrchestrator, fake_service
from twinjet.core.errors import ContextTooLong
from twinjet.server import requests as bodies
from twinjet.server.intake import Intake
from twinjet.server.service import ServerLimits


def test_many_short_prompts_let_others_in_between():
    async def scenario() -> tuple[int, int]:
        intake = Intake(fake_service(FakeOrchestrator()), ServerLimits())
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        try:
            job = await intake.completion(bodies.COMPLETION.decode(json.dumps({"prompt": ["ab"] * 500})))
        finally:
            running.cancel()
            intake.close()
        return len(job.prompts), turns

    num_prompts, turns = asyncio.run(scenario())
    assert num_prompts == 500
    assert turns >= 500


def test_a_long_tokenize_makes_no_prompt_wait(monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **options: bool) -> list[int]:
        if text.startswith("slow"):
            assert release.wait(30)
            return []
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)

    async def scenario() -> None:
        intake = Intake(fake_service(FakeOrchestrator()), ServerLimits())
        body = bodies.TOKENIZE.decode(json.dumps({"prompt": "slow" * 1000}))
        tokenizing = asyncio.create_task(intake.tokenize(body))
        await asyncio.sleep(0)
        # So many that they are rendered beside the loop as well.
        messages = [{"role": "user", "content": "a"}] * 200
        try:
            async with asyncio.timeout(20):
                with pytest.raises(ContextTooLong):
                    await intake.chat(bodies.CHAT.decode(json.dumps({"messages": messages})))
            assert not tokenizing.done()
        finally:
            release.set()
        assert await tokenizing == []
        intake.close()

    asyncio.run(scenario())
