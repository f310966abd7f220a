"""Which regular expressions cut a text into words before byte-level BPE, by the name in the file.

A GGUF file names its pre-tokenizer in `tokenizer.ggml.pre`. The names, and what each stands for, are those of
llama.cpp (src/llama-vocab.cpp, release b11434). Where llama.cpp notes that its own regular expression only
approximates the one the model was trained with (it cannot tell upper from lower case outside ASCII), the
original is used here.

Left out on purpose, and so refused:
- `superbpe`, `tiny_aya`, `cohere2moe`, `afmoe`, `jais-2`: their look-aheads take quadratic time on long runs;
- `kimi-k2`, `youtu`, `granite-embed-multi-97m`: llama.cpp gives only an approximation;
- `gemma4`, `mmbert`, `sarvam-moe`, `whitespace`, `chameleon`: not plain byte-level BPE over text;
- `jina-v1-en`, `jina-v2-*`, `roberta-bpe`, `modern-bert`: encoders, with separators and masks of their own.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from twinjet.core.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str, contractions: str = _CONTRACTIONS + "|") -> str:
    """The shape that Llama 3, Qwen 2 and others share; they differ in how numbers are cut."""
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(numbers: str, suffix: str) -> str:
    """The shape of Tekken and GPT-4o: a word also ends where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_GPT4O = (_cased_words(r"\p{N}{1,3}", rf"(?:{_CONTRACTIONS})?"),)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"

_DEEPSEEK_PUNCTUATION_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    rf"{_DEEPSEEK_PUNCTUATION_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words, none of which a merge crosses."""

    patterns: tuple[str, ...]
    """Each cuts the pieces that the one before left; what a pattern does not match stays a piece."""
    ignore_merges: bool = False
    """A word that is a token as it stands becomes that token, whatever the merges say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The cutter itself, for a `tokenizers.Tokenizer`; words come out as they are in the text."""
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns])


def _table() -> dict[str, PreTokenizer]:
    entries: list[tuple[str, PreTokenizer]] = [
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5",
            PreTokenizer(_LLAMA3, ignore_merges=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe", PreTokenizer(_LLAMA3)),
        (
            "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
            PreTokenizer(_QWEN2),
        ),
        (
            "qwen35",
            PreTokenizer(
                (
                    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
                )
            ),
        ),
        (
            "gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
            PreTokenizer((_GPT2,)),
        ),
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            PreTokenizer(_DIGITS_GPT2),
        ),
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
        ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
        (
            "deepseek-llm",
            PreTokenizer(
                (
                    r"[\r\n]",
                    rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
                    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
                    # The look-behind changes no match; without it, a run of spaces before a digit takes quadratic time.
                    r"(?<!\s)\s+$",
                    r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
                    r"\p{N}+",
                )
            ),
        ),
        (
            "deepseek-coder",
            PreTokenizer(
                (
                    r"[\r\n]",
                    r"\s?\p{L}+",
                    r"\s?\p{P}+",
                    r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
                    r"\p{N}",
                )
            ),
        ),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK_V3)),
        (
            "spark2_5",
            PreTokenizer(
                (
                    *_DEEPSEEK_V3[:2],
                    rf"{_DEEPSEEK_PUNCTUATION_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                    r"\p{N}",
                )
            ),
        ),
        ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
        ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
        ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(_GPT4O)),
        (
            "bailingmoe bailingmoe2 llada-moe",
            PreTokenizer(
                (
                    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
        ),
        (
            "seed-coder",
            PreTokenizer(
                (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
            ),
        ),
        ("ufakzeka", PreTokenizer((_words(r"\p{N}", contractions=""),))),
        (
            "exaone-moe",
            PreTokenizer(
                (
                    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
        ),
        ("laguna", PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2))),
        ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)),
    ]
    return {name: pre_tokenizer for names, pre_tokenizer in entries for name in names.split()}


PRE_TOKENIZERS = _table()
"""By `tokenizer.ggml.pre`."""


def pre_tokenizer_named(name: str | None) -> PreTokenizer:
    """Look a pre-tokenizer up. Raises `CheckpointError` for an unknown or a missing name: none is ever guessed."""
    if name is None:
        raise CheckpointError(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), so its tokens cannot be known; "
            "convert the model again with a current converter"
        )
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]
