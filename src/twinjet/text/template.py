"""Renders a chat with the template that came with the model, in a sandbox.

Offers what templates written for Hugging Face's `apply_chat_template` expect: block trimming, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that leaves text as it is, and `{% generation %}`, which only matters in
training. The template comes with a model file, so it is kept from touching Python objects, from the simplest ways to
eat memory, and from running for long: loops and calls look at a clock. It is not a jail.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinjet.core.errors import CheckpointError, InvalidRequest
from twinjet.core.vocab import VocabSpec
from twinjet.text.tokenizer import Tokenizer

MAX_RENDERED_CHARACTERS = 64 << 20
"""Far more than any context holds, little enough to stop a template that never ends its output."""

MAX_RENDER_S = 0.5
"""Processor time that one rendering may take; a chat of thousands of messages takes a hundredth of that."""

_STEPS_PER_LOOK = 128
"""Loop iterations and calls between two looks at the clock."""
_MAX_REPEATED_ITEMS = 1 << 20
_MAX_INTEGER_BITS = 4096


class ChatTemplate:
    """A compiled template. Any thread may use it."""

    def __init__(self, source: str, bos_text: str, eos_text: str) -> None:
        """Raises `CheckpointError` if `source` is not a template."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension]
        )
        self._clock = environment.clock
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the model's chat template does not compile: {error.message} (line {error.lineno})"
            ) from error
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise CheckpointError(f"the model's chat template does not compile: {error}") from error
        self._bos_text = bos_text
        self._eos_text = eos_text

    @classmethod
    def from_vocab(cls, vocab: VocabSpec, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template in the model's file; None if there is none."""
        if not vocab.chat_template:
            return None
        bos_text = "" if vocab.bos_id is None else tokenizer.token_text(vocab.bos_id)
        eos_text = "" if vocab.eos_id is None else tokenizer.token_text(vocab.eos_id)
        return cls(vocab.chat_template, bos_text, eos_text)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of a chat. `kwargs` reach the template as they are (`tools`, `documents`, a model's own switches).

        Raises `InvalidRequest` with the template's own words if it refuses the messages, or cannot handle them.
        """
        variables = {
            "tools": None,
            "documents": None,
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        self._clock.start()
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_RENDERED_CHARACTERS:
                    _raise_exception(f"its output is longer than {MAX_RENDERED_CHARACTERS} characters")
                parts.append(part)
        except Exception as error:  # a template can run into any error of Python
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", "messages"
            ) from error
        return "".join(parts)


class _Clock(threading.local):
    """Ends a rendering of this thread that takes too long."""

    def start(self) -> None:
        self._steps = 0
        self._deadline_s = time.thread_time() + MAX_RENDER_S

    def step(self) -> None:
        self._steps += 1
        if self._steps % _STEPS_PER_LOOK == 0 and time.thread_time() > self._deadline_s:
            _raise_exception(f"it takes longer than {MAX_RENDER_S:g} s")


class _Environment(ImmutableSandboxedEnvironment):
    """Also bounds how long loops and calls go on, and `*` and `**`, which make much out of little.

    (`range` is bounded by the sandbox itself, but loops can be nested.)
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = _Clock()
        self.filters["_timed"] = self._timed

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_timed", [], [], None, None, lineno=loop.lineno, environment=self)
        return template

    @jinja2.pass_context  # Which also keeps the compiler from running it ahead of time.
    def _timed(self, _context: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.clock.step()
            yield item

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.clock.step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise jinja2.exceptions.SecurityError(f"{operator} makes too large a number")
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if not (isinstance(items, str | list | tuple) and isinstance(count, int)):
                    continue
                if len(items) * count > _MAX_REPEATED_ITEMS:
                    raise jinja2.exceptions.SecurityError(f"{count} repetitions make too long a sequence")
        return super().call_binop(context, operator, left, right)


class _GenerationExtension(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what an assistant wrote, and renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ', which a model has never seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
