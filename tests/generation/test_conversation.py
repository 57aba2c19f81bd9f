"""Conversations as chat templates of several kinds take them, and templates that use up what there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from moe_ep.errors import ConfigError, MoeEpError
from moe_ep.generation.conversation import Conversation, ConversationRenderer
from moe_ep.generation.tokenizer import processor_templates

# As models have them: content is text alone, a list of parts alone, or either.
TEXT = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}<{{ m.role }}>{{ m['content'] + eos_token }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
# Other roles are left out without a word.
SILENT = (
    "{% for m in messages %}{% if m.role in ['user', 'system'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def with_calls(arguments: str) -> str:
    """A template that shows tool calls."""
    calls = "{% for call in m.tool_calls %}{{ call.function.name }}(" + arguments + "){% endfor %}"
    return TEXT.replace("{% endfor %}", calls + "{% endfor %}", 1)


OBJECTS = with_calls("{{ call.function.arguments | tojson }}")
STRINGS = with_calls("{{ '' + call.function.arguments }}")
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + OBJECTS


class Tokenizer:
    """What a renderer asks of a tokenizer."""

    def __init__(self, chat_template: str | dict[str, str]) -> None:
        self.chat_template = chat_template
        self.special_tokens_map = {"eos_token": "</s>"}

    def get_chat_template(self, given: str | None, tools: Any) -> str:
        return PreTrainedTokenizerBase.get_chat_template(self, given, tools)


@pytest.fixture(scope="module")
def renderer() -> Iterator[ConversationRenderer]:
    """Its tokenizer's template is each test's."""
    made = ConversationRenderer(Tokenizer(TEXT))
    yield made
    made.close()


def rendered(renderer: ConversationRenderer, template: Any, *messages: dict[str, Any], **settings: Any) -> str:
    renderer.tokenizer.chat_template = template
    return renderer.render(Conversation.from_line({"messages": list(messages), **settings}))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}], **more}


PAIR = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TEXT, [user("x")], "<user>x<a>"),
        (TEXT, [user(PAIR)], "<user>x\ny<a>"),
        (TEXT, [user([*PAIR, "z"])], "<user>x\ny\nz<a>"),
        (PARTS, [user("x")], "<user>x"),
        (PARTS, [user(PAIR)], "<user>xy"),
        (EITHER, [user("x"), {"role": "assistant", "content": PAIR}], "<user>x<assistant>[x][y]"),
        # A part that some template prints as Python writes it is none that it takes.
        (EITHER.replace("part.text", "part"), [user(PAIR)], "<user>x\ny"),
        (STRICT, [{"role": "system", "content": "s"}, user(PAIR)], "<system>s</s><user>x\ny</s>"),
        (STRICT, [{"role": "developer", "content": "s"}, user("x")], "<system>s</s><user>x</s>"),
        (SILENT, [{"role": "developer", "content": "s"}, user("x")], "<system>s<user>x"),
        (TEXT, [{"role": "developer", "content": "s"}, user("x")], "<developer>s<user>x<a>"),
        (OBJECTS, [user("x"), calling('{"a": 1}')], '<user>x<assistant>f({"a": 1})<a>'),
        (OBJECTS, [user("x"), calling({"a": 1}, content=None)], '<user>x<assistant>f({"a": 1})<a>'),
        (OBJECTS, [user("x"), calling("")], "<user>x<assistant>f({})<a>"),
        (STRINGS, [user("x"), calling('{"a":1}')], '<user>x<assistant>f({"a":1})<a>'),
        (STRINGS, [user("x"), calling({"a": 1})], '<user>x<assistant>f({"a": 1})<a>'),
        (STRICT, [user("x"), {"role": "assistant", "content": None}], "<user>x</s><assistant></s>"),
        (TEXT, [user("x"), {"role": "assistant", "content": None, "refusal": "no"}], "<user>x<assistant>no<a>"),
        (TEXT, [user("x"), calling("{}"), {"role": "tool", "tool_call_id": "1", "content": "42"}],
         "<user>x<assistant><tool>42<a>"),
        ("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}", [{**user("x"), "name": "Ada"}], "Ada: x"),
    ],
)  # fmt: skip
def test_messages(renderer: ConversationRenderer, template: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert rendered(renderer, template, *messages) == expected


def test_settings_reach_the_template(renderer: ConversationRenderer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = json.dumps(tools)
    assert rendered(renderer, TOOLS, user("x"), tools=tools) == f"{shown}<user>x<a>"
    assert rendered(renderer, TOOLS, user("x"), chat_template_kwargs={"tools": tools}) == f"{shown}<user>x<a>"
    assert rendered(renderer, TOOLS, user("x"), tools=[], documents=None) == "<user>x<a>"
    documents = [{"title": "t", "text": "d"}]
    assert (
        rendered(renderer, "{{ documents[0].text }}{{ messages[0].content }}", user("x"), documents=documents) == "dx"
    )
    thinks = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{{ effort }}"
    kwargs = {"enable_thinking": True, "effort": "low"}
    assert rendered(renderer, thinks, user("x"), chat_template_kwargs=kwargs) == "x<think>low"
    assert rendered(renderer, TEXT, user("x"), add_generation_prompt=False) == "<user>x"
    begun = {"role": "assistant", "content": "I th"}
    assert rendered(renderer, STRICT, user("x"), begun, continue_final_message=True) == "<user>x</s><assistant>I th"
    # Several templates by name, as additional_chat_templates/ and lists in tokenizer_config.json have them.
    several = {"default": TEXT, "tool_use": "T" + TOOLS, "short": "{{ messages[0].content }}"}
    assert rendered(renderer, several, user("x")) == "<user>x<a>"
    assert rendered(renderer, several, user("x"), tools=tools) == f"T{shown}<user>x<a>"
    assert rendered(renderer, several, user("x"), chat_template="short") == "x"
    assert rendered(renderer, TEXT, user("x"), chat_template="{{ messages[0].role }}: {{ messages[0].content }}") == (
        "user: x"
    )


@pytest.mark.parametrize(
    ("template", "messages", "settings", "named"),
    [
        (TEXT, [user("x")], {"tools": [{"type": "function"}]}, "tools"),
        (TEXT, [user("x")], {"documents": [{"text": "d"}]}, "documents"),
        (TEXT, [user("x")], {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ("{{ think }}" + TEXT, [user("x")], {"think": True}, "think is a variable .* chat_template_kwargs"),
        (PARTS, [user("x")], {"add_generation_prompt": False}, "add_generation_prompt"),
        (STRICT, [user("x"), {"role": "tool", "content": "42"}], {}, "no tool"),
        (SILENT, [user("x"), {"role": "tool", "content": "42"}], {}, r"messages\[1\] has the role tool"),
        ("{{ messages[0].content", [user("x")], {}, "TemplateSyntaxError"),
        ({"one": TEXT, "two": TEXT}, [user("x")], {}, "one"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_take(
    renderer: ConversationRenderer, template: Any, messages: list[dict[str, Any]], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        rendered(renderer, template, *messages, **settings)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [3]}, r"messages\[0\]"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"messages": [user("x"), {"role": "user"}]}, r"messages\[1\] has no content"),
        ({"messages": [user(3)]}, r"messages\[0\].content"),
        ({"messages": [user([3])]}, r"content\[0\]"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "u"}}])]}, "image_url"),
        ({"messages": [user([{"type": "input_audio", "input_audio": {}}])]}, "input_audio"),
        ({"messages": [user([{"type": "text"}])]}, r"content\[0\].text"),
        ({"messages": [user("x"), calling("{")]}, r"tool_calls\[0\] has the arguments"),
        ({"messages": [user("x"), calling("3")]}, r"tool_calls\[0\] has the arguments"),
        ({"messages": [user("x"), {"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\]"),
        ({"messages": [user("x")], "tools": {}}, "tools"),
        ({"messages": [user("x")], "tools": [3]}, "tools"),
        ({"messages": [user("x")], "documents": "d"}, "documents"),
        ({"messages": [user("x")], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [user("x")], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": [user("x")], "tools": [{}], "chat_template_kwargs": {"tools": [{}]}}, "tools"),
        ({"messages": [user("x")], "add_generation_prompt": 1}, "add_generation_prompt"),
        ({"messages": [user("x")], "continue_final_message": 1}, "continue_final_message"),
        (
            {"messages": [user("x")], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_is_no_conversation(line: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Conversation.from_line(line)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 2000000000 }}",
        "{{ range(10**9) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ '%2000000000d' % 1 }}",
        "{% set ns = namespace(a=['x']) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{{ 'x' * 20000000 }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_a_template_that_takes_all_there_is(renderer: ConversationRenderer, template: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        rendered(renderer, "{{ messages[0].content }}" + template, user("x"))
    # Others are answered as before.
    assert rendered(renderer, TEXT, user("x")) == "<user>x<a>"


def test_templates_of_processors(tmp_path: Path) -> None:
    assert processor_templates(tmp_path) is None
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        (tmp_path / name).write_text(json.dumps({"size": 3}))
        assert processor_templates(tmp_path) != {"size": 3}
        (tmp_path / name).write_text(json.dumps({"chat_template": name}))
        assert processor_templates(tmp_path) == name
    (tmp_path / name).write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    assert processor_templates(tmp_path) == {"default": "x"}
    for wrong in ("3", "{", '{"chat_template": 3}', '{"chat_template": [3]}'):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(MoeEpError, match=name):
            processor_templates(tmp_path)
