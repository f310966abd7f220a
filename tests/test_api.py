"""`LLM` and `AsyncLLM` on a tiny random model in a real engine process."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import bpe_vocab, write_tiny_llama
from twinjet import LLM, AsyncLLM, Completion, EngineOptions, SamplingParams
from twinjet.core.errors import CheckpointError, ConfigError, ContextTooLong, InvalidRequest

TINY = EngineOptions(max_streams=4, threads=1, kv_memory=4 << 20, token_budget=4)
PROMPT = "Hello world"


@pytest.fixture(scope="module")
def llm(tiny: str, home: Path) -> Iterator[LLM]:
    with LLM(tiny, options=TINY, home=home) as running:
        yield running


def generate_one(
    llm: LLM, *, max_tokens: int = 8, sampling: SamplingParams | None = None, **rest: object
) -> Completion:
    chosen = sampling or SamplingParams(temperature=0.0)
    (result,) = llm.generate(PROMPT, chosen, max_tokens=max_tokens, ignore_eos=True, **rest)  # pyright: ignore[reportArgumentType]
    return result


def test_a_result_says_everything(llm: LLM):
    tokenizer = llm.assembly.model.tokenizer
    result = generate_one(llm, logprobs=2)
    assert result.prompt_token_ids == tuple(tokenizer.encode(PROMPT, add_special=True))
    assert len(result.token_ids) == 8
    assert result.finish_reason == "length"
    assert result.text == tokenizer.decode(list(result.token_ids))
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(result.prompt_token_ids), 8)
    assert result.usage.total_tokens == len(result.prompt_token_ids) + 8
    assert result.logprobs is not None
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.top_ids[0] == token_id
        assert entry.top_logprobs[0] == entry.logprob
        assert len(entry.top_ids) == 2
    assert generate_one(llm).logprobs is None


def test_many_prompts_run_together_and_keep_their_order(llm: LLM):
    prompts = [f"Hello {'the ' * (i % 5)}world {i}" for i in range(25)]
    alone = [llm.generate(prompt, max_tokens=6)[0] for prompt in prompts]
    assert llm.generate(prompts, max_tokens=6) == alone
    assert len({result.token_ids for result in alone}) > 1


def test_token_ids_are_a_prompt_too(llm: LLM):
    ids = llm.assembly.model.tokenizer.encode(PROMPT, add_special=True)
    assert llm.generate([ids], max_tokens=8, ignore_eos=True) == [generate_one(llm)]


def test_nothing_to_generate_is_no_error(llm: LLM):
    assert llm.generate([]) == []


def test_sampling_repeats_for_a_seed_and_differs_between_seeds(llm: LLM):
    hot = [SamplingParams(temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    first, again, other = llm.generate([PROMPT] * 3, hot, max_tokens=16, ignore_eos=True)
    assert first.token_ids == again.token_ids != other.token_ids


def test_a_stop_string_ends_the_text_and_is_not_in_it(llm: LLM):
    whole = generate_one(llm, max_tokens=40)
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = generate_one(llm, max_tokens=40, stop=stop)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text.partition(stop)[0]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40


def test_without_max_tokens_the_context_is_filled(llm: LLM):
    (result,) = llm.generate(PROMPT, max_tokens=None, ignore_eos=True)
    assert len(result.prompt_token_ids) + len(result.token_ids) == llm.assembly.engine.scheduler.context == 512


def test_chat_renders_the_template(llm: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    template = llm.assembly.model.template
    assert template is not None
    rendered = llm.assembly.model.tokenizer.encode(template.render(messages))
    result = llm.chat(messages, max_tokens=8)
    assert result.prompt_token_ids == tuple(rendered)
    assert result == llm.generate([rendered], max_tokens=8)[0]


def test_a_chat_gets_the_bos_that_its_template_leaves_out(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    tokenizer = llm.assembly.model.tokenizer
    monkeypatch.setattr(tokenizer, "add_bos", True)
    monkeypatch.setattr(tokenizer, "bos_id", 0)
    ids = llm.chat([{"role": "user", "content": "Hello"}], max_tokens=1).prompt_token_ids
    assert tokenizer.decode(ids, skip_special=False).startswith("<|endoftext|><|im_start|>user")


def test_a_stream_is_the_result_in_pieces(llm: LLM):
    whole = generate_one(llm, logprobs=0)
    deltas = list(llm.stream(PROMPT, max_tokens=8, ignore_eos=True, logprobs=0))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert tuple(entry for delta in deltas for entry in delta.logprobs or ()) == whole.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_leaving_a_stream_early_ends_its_request(llm: LLM):
    for _ in llm.stream(PROMPT, max_tokens=400, ignore_eos=True):
        break
    orchestrator = llm.assembly.orchestrator
    for _ in range(500):
        if orchestrator.stats().num_requests == 0:
            return
        threading.Event().wait(0.01)
    pytest.fail("the request still runs")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prompts": ""}, InvalidRequest),
        ({"prompts": [[]]}, InvalidRequest),
        ({"prompts": [1, 2, 3]}, InvalidRequest),
        ({"prompts": [[10**6]]}, InvalidRequest),
        ({"prompts": PROMPT, "max_tokens": 0}, InvalidRequest),
        ({"prompts": PROMPT, "max_tokens": 1000}, ContextTooLong),
        ({"prompts": [PROMPT, [1] * 600]}, ContextTooLong),
        ({"prompts": PROMPT, "logprobs": 50}, InvalidRequest),
        ({"prompts": [PROMPT], "sampling": []}, InvalidRequest),
    ],
)
def test_what_cannot_work_is_a_typed_error_and_harms_nothing(llm: LLM, wrong: dict, error: type[Exception]):
    before = generate_one(llm)
    with pytest.raises(error):
        llm.generate(**wrong)
    assert generate_one(llm) == before


def test_several_threads_may_use_one(llm: LLM):
    expected = generate_one(llm)
    results: list[Completion] = []
    threads = [threading.Thread(target=lambda: results.append(generate_one(llm))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 6


def test_the_async_one_gives_the_same_inside_a_running_loop(llm: LLM, tiny: str, home: Path):
    expected = generate_one(llm)

    async def use() -> None:
        async with AsyncLLM(tiny, options=TINY, home=home) as running:
            greedy = SamplingParams(temperature=0.0)
            pieces = [delta async for delta in running.stream(PROMPT, greedy, max_tokens=8, ignore_eos=True)]
            assert "".join(delta.text for delta in pieces) == expected.text
            assert await running.generate([PROMPT, PROMPT], max_tokens=8, ignore_eos=True) == [expected] * 2
            # As a notebook does, whose own loop runs already.
            assert generate_one(llm) == expected
        with pytest.raises(ConfigError, match="not running"):
            await running.generate(PROMPT)

    asyncio.run(use())


def test_a_program_that_forgets_to_close_leaves_nothing_behind(tiny: str, home: Path):
    code = (
        "import sys; from twinjet import LLM, EngineOptions\n"
        "options = EngineOptions(max_streams=4, threads=1, kv_memory=4 << 20, token_budget=4)\n"
        "llm = LLM(sys.argv[1], home=sys.argv[2], options=options)\n"
        "print(llm.assembly.orchestrator.stats().engines[0].pid)\n"
    )
    command = [sys.executable, "-c", code, tiny, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert not psutil.pid_exists(int(done.stdout))


def test_a_model_that_cannot_be_read_is_a_typed_error(tmp_path: Path):
    (tmp_path / "bad.gguf").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "bad.gguf"), home=tmp_path)


def test_a_base_model_cannot_chat_and_closing_ends_its_engine(tmp_path: Path, home: Path):
    base = write_tiny_llama(tmp_path / "base.gguf", vocab=bpe_vocab(chat_template=None))
    with LLM(str(base), options=TINY, home=home) as running:
        with pytest.raises(InvalidRequest, match="base model"):
            running.chat([{"role": "user", "content": "Hello"}])
        pids = [engine.pid for engine in running.assembly.orchestrator.stats().engines]
        assert all(pid is not None and psutil.pid_exists(pid) for pid in pids)
    running.close()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ConfigError, match="closed"):
        running.generate(PROMPT)
