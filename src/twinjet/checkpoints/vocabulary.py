"""Turns the tokenizer metadata of a GGUF file into a `VocabSpec`.

Owns the keys, their defaults and which tokens end a generation, all as in llama.cpp (`llama_vocab::impl::load` in
src/llama-vocab.cpp); knows nothing of how text is split.
"""

from collections.abc import Sequence
from typing import Literal

from twinjet.checkpoints.metadata import Metadata
from twinjet.checkpoints.reader import GGUFFile
from twinjet.core.errors import CheckpointError
from twinjet.core.vocab import TokenType, VocabSpec

_KINDS: dict[str, Literal["bpe", "spm"]] = {"gpt2": "bpe", "llama": "spm"}

_ADD_BOS_PRES = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    }
)
"""Pre-tokenizers whose models want BOS when the file does not say."""

_END_TEXTS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]"),
    }
)
"""Texts of tokens that end a turn in one chat format or another, whatever type the file gives them.

Unlike llama.cpp's list this one leaves out the likes of `</s>`: where such a token ends a text it is EOS by id, and
elsewhere (in Gemma's vocabulary) it is an HTML tag.
"""


def read_vocab_spec(file: GGUFFile) -> VocabSpec:
    """The vocabulary of any GGUF file, also of one without tensors. Raises `CheckpointError`."""
    metadata, path = file.metadata, file.path
    model = metadata.text("tokenizer.ggml.model")
    kind = _KINDS.get(model)
    if kind is None:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {model!r}, which is not supported; supported: {', '.join(_KINDS)}"
        )
    tokens = metadata.strings("tokenizer.ggml.tokens")
    token_types = _read_token_types(file, len(tokens))
    named_ends = [token_id for token_id, text in enumerate(tokens) if text in _END_TEXTS]
    for token_id in named_ends:
        # A writer that marked them as ordinary text made a mistake.
        token_types[token_id] = TokenType.CONTROL
    is_spm = kind == "spm"
    pre = metadata.optional_text("tokenizer.ggml.pre") if kind == "bpe" else None
    eos_id = _read_id(metadata, "eos", len(tokens), 2 if is_spm else None)
    ends = [eos_id, *(_read_id(metadata, name, len(tokens), None) for name in ("eot", "eom")), *named_ends]
    return VocabSpec(
        kind=kind,
        tokens=tokens,
        token_types=tuple(token_types),
        scores=_read_scores(file, len(tokens)) if is_spm else (),
        merges=metadata.strings("tokenizer.ggml.merges") if kind == "bpe" else (),
        pre=pre,
        bos_id=_read_id(metadata, "bos", len(tokens), 1 if is_spm else None),
        eos_id=eos_id,
        end_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        unknown_id=_read_id(metadata, "unknown", len(tokens), 0 if is_spm else None),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", is_spm or pre in _ADD_BOS_PRES),
        add_eos=metadata.flag("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", is_spm),
        chat_template=metadata.optional_text("tokenizer.chat_template"),
    )


def _read_id(metadata: Metadata, name: str, num_tokens: int, default: int | None) -> int | None:
    """The id of a special token; an id outside the vocabulary (some writers mean "none") counts as not given."""
    token_id = metadata.optional_integer(f"tokenizer.ggml.{name}_token_id")
    if token_id is None or not 0 <= token_id < num_tokens:
        token_id = default
    return token_id if token_id is not None and token_id < num_tokens else None


def _read_token_types(file: GGUFFile, num_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if key not in file.metadata:
        return [TokenType.NORMAL] * num_tokens
    types = file.metadata.numbers(key)
    if types.dtype.kind not in "iu":
        raise CheckpointError(f"{file.path}: {key} must hold integers")
    _check_length(file, key, types.tolist(), num_tokens)
    return types.tolist()


def _read_scores(file: GGUFFile, num_tokens: int) -> tuple[float, ...]:
    key = "tokenizer.ggml.scores"
    scores = file.metadata.numbers(key).tolist()
    _check_length(file, key, scores, num_tokens)
    return tuple(map(float, scores))


def _check_length(file: GGUFFile, key: str, values: Sequence[float], num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise CheckpointError(f"{file.path}: {key} has {len(values)} entries for {num_tokens} tokens")
