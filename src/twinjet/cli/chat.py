"""`twinjet chat`: a conversation in the terminal.

Reads lines from standard input, so it can also be scripted through a pipe.
"""

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from twinjet.cli.options import (
    Context,
    Exact,
    KVMemory,
    KVType,
    MaxTokens,
    MinP,
    Model,
    Seed,
    Threads,
    TokenBudget,
    TopK,
    TopP,
    engine_options,
)
from twinjet.core.errors import CapacityError, ConfigError, RequestError
from twinjet.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from twinjet.api import LLM
    from twinjet.core.types import SamplingParams

HELP = """\
/help              this list
/system TEXT       set the system message, for all that follows; without TEXT: show it
/clear             forget the conversation, keep the system message
/temperature X     set the temperature, 0 for always the most likely token; without X: show it
/exit              leave; so does Ctrl-D
Ctrl-C stops an answer. Anything else is sent to the model."""


def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Seed = None,
    context: Context = None,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    kv_dtype: KVType = None,
    exact: Exact = False,
    token_budget: TokenBudget = None,
) -> None:
    """Talk to a model in the terminal; /help lists the commands."""
    from twinjet.cli.session import open_with_progress, sampling_params, start_with_progress

    sampling = sampling_params(temperature, top_k, top_p, min_p, seed)
    options = engine_options(
        context=context,
        max_streams=1,
        threads=threads,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        exact=exact,
        token_budget=token_budget,
    )
    opened = open_with_progress(model)
    if opened.template is None:
        raise ConfigError(
            f"{opened.name} is a base model without a chat template and cannot chat; "
            f'complete text with: twinjet run {model} "..."'
        )
    with start_with_progress(opened, options) as llm:
        typer.echo(f"{opened.name}; /help lists the commands, Ctrl-D leaves", err=True)
        Conversation(llm, sampling, max_tokens, system).hold()


@dataclass(slots=True)
class Conversation:
    """One conversation: its messages, and the settings that its commands change."""

    llm: "LLM"
    sampling: "SamplingParams"
    max_tokens: int | None
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    over: bool = False

    def hold(self) -> None:
        """Read and answer lines until /exit or the end of the input."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives input() line editing and a history
        while not self.over:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                if sys.stdin.isatty():
                    typer.echo()
                return
            except KeyboardInterrupt:
                typer.echo()
                continue
            if line.startswith("/"):
                self.command(line)
            elif line.strip():
                self.answer(line)

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/help":
                typer.echo(HELP)
            case "/exit":
                self.over = True
            case "/clear":
                self.messages.clear()
                typer.echo("cleared")
            case "/system":
                self.system = argument or self.system
                typer.echo(f"system: {self.system or '(none)'}")
            case "/temperature":
                self._set_temperature(argument)
            case _:
                typer.echo(f"unknown command {name}; /help lists them")

    def answer(self, text: str) -> None:
        """Stream the reply to one message. One that is stopped stays in the history as far as it came."""
        self.messages.append({"role": "user", "content": text})
        reply: list[str] = []
        try:
            for delta in self.llm.stream_chat(self._with_system(), self.sampling, max_tokens=self.max_tokens):
                typer.echo(delta.text, nl=False)
                reply.append(delta.text)
            typer.echo()
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except (RequestError, CapacityError) as error:
            self.messages.pop()
            typer.echo(f"{error}\n/clear begins anew", err=True)
            return
        self.messages.append({"role": "assistant", "content": "".join(reply)})

    def _with_system(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def _set_temperature(self, argument: str) -> None:
        if argument:
            try:
                self.sampling = replace(self.sampling, temperature=float(argument))
            except ValueError:
                typer.echo(f"expected a number, got {argument!r}")
                return
            except RequestError as error:
                typer.echo(str(error))
                return
        typer.echo(f"temperature: {self.sampling.temperature:g}")
