"""Chat templates: what real ones use, and what bad ones run into."""

import json
from dataclasses import replace

import pytest

from tests.text.vocabularies import BOS, BYTE_LEVEL, EOS, HE, TURN, byte_level_tokenizer
from twinjet.core.errors import CheckpointError, InvalidRequest
from twinjet.text.chat import encode_chat, encode_rendered_chat
from twinjet.text.template import ChatTemplate

_USER = [{"role": "user", "content": "hi"}]


def _render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: object) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render(_USER if messages is None else messages, **kwargs)  # pyright: ignore[reportArgumentType]


def test_messages_special_tokens_and_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert _render(source) == "<s>[user] hi</s>[assistant]"
    assert _render(source, add_generation_prompt=False) == "<s>[user] hi</s>"


def test_blocks_leave_no_blank_lines() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert _render(source) == "U hi\n"


def test_loop_controls() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert _render(source) == "02"


def test_what_a_loop_knows_of_itself() -> None:
    source = (
        "{% for x in [5, 6] %}{{ loop.index }}/{{ loop.length }}={{ x }}{{ ',' if not loop.last }}{% endfor %} "
        "{% for x in [] %}{% else %}none{% endfor %} {% for k, v in messages[0].items() if k != 'role' %}"
        "{{ k }}={{ v }}{% endfor %} "
        "{% for x in [[1, [2]], 3] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
    )
    assert _render(source) == "1/2=5,2/2=6 none content=hi 123"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages %}{% for i in range(99999) if i is none %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_and_on_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinjet.text.template.MAX_RENDER_S", 0.005)
    with pytest.raises(InvalidRequest, match="takes longer than"):
        _render(source)
    # The clock begins anew with each rendering.
    assert _render("{% for i in range(99) %}{{ i // 98 }}{% endfor %}") == "0" * 98 + "1"


def test_generation_blocks_render_as_their_content() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert _render(source) == "hi"


def test_to_json_leaves_text_as_it_is() -> None:
    tools = [{"name": "f", "text": "<é> & 'x'"}]
    assert _render("{{ tools | tojson }}", tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert _render("{{ tools | tojson(indent=2) }}", tools=tools) == json.dumps(tools, ensure_ascii=False, indent=2)


def test_tools_and_documents_are_none_unless_given() -> None:
    source = "{{ 'none' if tools is none and documents is none else 'some' }}"
    assert _render(source) == "none"
    assert _render(source, tools=[]) == "some"


def test_strftime_now() -> None:
    year = _render("{{ strftime_now('%Y') }}")
    assert year.isdigit()
    assert len(year) == 4


def test_extra_variables() -> None:
    assert _render("{{ 'think' if enable_thinking else 'answer' }}", enable_thinking=True) == "think"
    assert _render("{{ 'think' if enable_thinking else 'answer' }}") == "answer"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[7].content }}", "no element 7|undefined|has no"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.no_such() }}", "no_such"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% for i in range(10000000) %}{{ i }}{% endfor %}", "[Rr]ange"),
        ("{{ 'a' * 100000000 }}", "repetitions"),
        ("{{ 100000000 * [1] }}", "repetitions"),
        ("{{ 9 ** 99999999 }}", "too large a number"),
        (
            "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "too large a number",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
            "longer than",
        ),
    ],
)
def test_what_goes_wrong_is_the_requests_fault_in_the_templates_words(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        _render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}", "{{ a b }}", "{% no_such_tag %}", "{{ x | no_such_filter }}"]
)
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate(source, "", "")


def test_a_compile_error_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="line 3"):
        ChatTemplate("a\nb\n{% endfor %}", "", "")


def test_text_of_messages_is_no_template() -> None:
    assert (
        _render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 1 + 1 }}{% raw %}"}])
        == "{{ 1 + 1 }}{% raw %}"
    )


def test_from_vocab() -> None:
    tokenizer = byte_level_tokenizer()
    assert ChatTemplate.from_vocab(BYTE_LEVEL, tokenizer) is None
    with_template = replace(BYTE_LEVEL, chat_template="{{ bos_token }}|{{ eos_token }}")
    template = ChatTemplate.from_vocab(with_template, tokenizer)
    assert template is not None
    assert template.render(_USER) == "<bos>|<eos>"


def test_a_prompt_has_one_bos() -> None:
    tokenizer = byte_level_tokenizer()
    written = ChatTemplate("{{ bos_token }}he<|turn|>", "<bos>", "<eos>")
    unwritten = ChatTemplate("he<|turn|>", "<bos>", "<eos>")
    for template in (written, unwritten):
        assert encode_chat(tokenizer, template, _USER) == [BOS, HE, TURN]
    assert encode_rendered_chat(tokenizer, "") == [BOS]
    # Neither taken off nor added where the file does not ask for it; EOS never added.
    without = byte_level_tokenizer(add_bos=False, add_eos=True)
    assert encode_chat(without, written, _USER) == [BOS, HE, TURN]
    assert encode_chat(without, unwritten, _USER) == [HE, TURN]
    assert EOS not in encode_chat(without, unwritten, _USER)
