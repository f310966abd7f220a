"""Which requests can run at all. Knows the engines' limits and the request, nothing else."""

from twinjet.core.errors import ContextTooLong, InvalidRequest
from twinjet.core.types import MAX_LOGPROBS, EngineInfo, Request


def check_request(request: Request, info: EngineInfo) -> None:
    """Raises: InvalidRequest, ContextTooLong."""
    _check_types(request)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {request.max_tokens}", "max_tokens")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise InvalidRequest(f"the deadline must be over 0 seconds, got {request.deadline_s}", "deadline_ms")
    _check_context(len(request.prompt_ids), request.max_tokens, info.context)
    _check_vocabulary("the prompt", request.prompt_ids, info.vocab_size, "prompt")
    _check_vocabulary("stop_token_ids", request.stop_token_ids, info.vocab_size, "stop_token_ids")
    if request.num_logprobs is not None and not 0 <= request.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"log-probabilities of 0 to {MAX_LOGPROBS} tokens can be reported, got {request.num_logprobs}", "logprobs"
        )


def _check_types(request: Request) -> None:
    """Python lets through what no engine can read; such a request would cost engine after engine."""
    sampling = request.sampling
    for name, value in (
        ("max_tokens", request.max_tokens),
        ("logprobs", request.num_logprobs),
        ("top_k", sampling.top_k),
        ("seed", sampling.seed),
        ("choice", sampling.choice),
        ("priority", request.priority),
    ):
        if type(value) is not int and not (value is None and name == "logprobs"):
            raise InvalidRequest(f"{name} must be an int, got {value!r}", name)
    for name, value in (
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
    ):
        if type(value) is not int and not isinstance(value, float):
            raise InvalidRequest(f"{name} must be a float, got {value!r}", name)
    for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.stop_token_ids)):
        # numpy's integers are fine. Types first: a prompt has few, and may have 100,000 ids.
        if not all(hasattr(kind, "__index__") for kind in set(map(type, ids))):
            wrong = next(one for one in ids if not hasattr(one, "__index__"))
            raise InvalidRequest(f"{name}: token ids must be integers, got {wrong!r}", name)


def _check_context(num_prompt: int, max_tokens: int, context: int) -> None:
    if num_prompt >= context:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, but the context holds {context} "
            "tokens in all; shorten the prompt, or start the server with a larger --context",
            "prompt",
        )
    if num_prompt + max_tokens > context:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together {num_prompt + max_tokens}, "
            f"but the context holds {context} tokens; shorten the prompt or lower max_tokens to at most "
            f"{context - num_prompt}",
            "max_tokens",
        )


def _check_vocabulary(what: str, token_ids: tuple[int, ...] | frozenset[int], vocab_size: int, param: str) -> None:
    if not token_ids:
        return
    # min and max keep the common, valid case out of Python loops: prompts may have 100,000 ids.
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{what}: token ids go from 0 to {vocab_size - 1}, got {token_id}", param)
