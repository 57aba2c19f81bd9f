"""OpenAI-style conversations as prompts, by the chat template of a checkpoint.

A conversation is the `messages` of a chat request, with the settings that go to the template: `tools`, `documents`,
`chat_template_kwargs` and so on. Templates differ in what they take, so it is found by rendering a short example:
content as text or as a list of parts, arguments of tool calls as objects or as JSON, the role `developer` or `system`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ep.errors import ConfigError
from moe_ep.files import parse_json
from moe_ep.generation.template_process import TemplateError, TemplateLimitError, TemplateProcess

Message = dict[str, Any]

# Fields of a line that go to the template.
TEMPLATE_FIELDS = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
# Parts of content that are text, and where it stands in them.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Arguments of transformers' apply_chat_template that are no variables of a template.
_NOT_VARIABLES = frozenset(
    {
        *("conversation", "conversations", "messages", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
        "tokenizer_kwargs",
    }
)
_PROBE = "moe_ep 7391 probe"
_PRINTED_PART = re.compile(f"""['"]text['"]: ?['"]{_PROBE}""")
# How often the template process may be ended before the template is refused; each time takes seconds.
_MOST_ENDED = 3


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The input of a chat template.

    Attributes:
        messages: each an object with a role, and with content as text, as a list of parts, or absent.
        tools: functions that the model may call, each an object; None for none.
        documents: objects that the model may quote; None for none.
        chat_template: a name of one of the checkpoint's templates, or a template; None for its default.
        add_generation_prompt: whether the text ends with the beginning of an answer; None where the line does not say.
        continue_final_message: whether the model goes on with the last message; a text names the field of it.
        others: the names of all other fields of the line.
        is_text: whether the line is a text that --chat makes a message.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str = False
    variables: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    is_text: bool = False

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Conversation:
        """The conversation of an object with `messages` and fields of `TEMPLATE_FIELDS`.

        Raises:
            ValueError: a field that is not what a chat request may hold; the message names it.
        """
        given = {name: line[name] for name in TEMPLATE_FIELDS if line.get(name) is not None}
        variables = dict(_checked(given, "chat_template_kwargs", dict, "an object") or {})
        for name in [name for name in variables if name in TEMPLATE_FIELDS]:
            if name in given:
                raise ValueError(f"{name} stands in the line and in its chat_template_kwargs; leave one out")
            given[name] = variables.pop(name)
        for name in sorted(_NOT_VARIABLES & variables.keys()):
            raise ValueError(f"chat_template_kwargs has {name}, which is no variable of a template; leave it out")
        go_on = given.get("continue_final_message", False)
        if not isinstance(go_on, bool | str):
            raise ValueError(f"continue_final_message is {go_on!r}; it must be true, false or the name of a field")
        begins = _checked(given, "add_generation_prompt", bool, "true or false")
        if go_on and begins:
            raise ValueError("add_generation_prompt and continue_final_message are both set; leave one out")
        messages = line["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"messages is {_shown(messages)}; it must be a list of messages, one at least")
        return cls(
            messages=[_checked_message(f"messages[{at}]", message) for at, message in enumerate(messages)],
            tools=_objects(given, "tools"),
            documents=_objects(given, "documents"),
            chat_template=_checked(given, "chat_template", str, "a text"),
            add_generation_prompt=begins,
            continue_final_message=go_on,
            variables=variables,
            others=tuple(sorted(set(line) - {"messages", "prompt", *TEMPLATE_FIELDS})),
        )


class ConversationRenderer:
    """Renders conversations with the templates of a tokenizer; `close` ends the process that runs them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._process = TemplateProcess()
        self._num_ended = 0
        self._probes: dict[tuple[str, ...], bool | None] = {}
        self._variables: dict[str, frozenset[str]] = {}

    def close(self) -> None:
        self._process.close()

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, special tokens included.

        Raises:
            ConfigError: the template does not take it, or does not read one of its settings.
        """
        try:
            template = self.tokenizer.get_chat_template(conversation.chat_template, conversation.tools)
        except ValueError as error:  # it has several, none of them the default
            raise ConfigError(f"the model's tokenizer has no such chat template: {error}") from None
        try:
            settings = self._settings(template, conversation)
            messages = [
                self._as_taken(template, settings, f"messages[{at}]", message)
                for at, message in enumerate(conversation.messages)
            ]
            return self._first_that_renders(template, messages, settings)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not take it: {error}") from None

    def _settings(self, template: str, conversation: Conversation) -> dict[str, Any]:
        """Arguments for the template; ConfigError for those that it does not read."""
        if template not in self._variables:
            self._variables[template] = frozenset(self._ask(template=template))
        known = self._variables[template]
        given = {"tools": conversation.tools, "documents": conversation.documents, **conversation.variables}
        asked = {name for name, value in given.items() if value is not None}
        if conversation.add_generation_prompt is False:
            asked.add("add_generation_prompt")
        for name in sorted(asked - known):
            raise ConfigError(f"{name} is given and the model's chat template does not read it; leave it out")
        for name in sorted(known.intersection(conversation.others)):
            raise ConfigError(f"{name} is a variable of the model's chat template; put it into chat_template_kwargs")
        begins = conversation.add_generation_prompt
        tokens = {name: value for name, value in self.tokenizer.special_tokens_map.items() if value is not None}
        return {
            **{name: value if isinstance(value, list) else str(value) for name, value in tokens.items()},
            **given,
            "add_generation_prompt": not conversation.continue_final_message if begins is None else begins,
            "continue_final_message": conversation.continue_final_message,
        }

    def _as_taken(self, template: str, settings: dict[str, Any], name: str, message: Message) -> Message:
        """A message in the form in which the template shows its content."""
        content = message.get("content")
        if not content:
            return message
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for role in dict.fromkeys((message["role"], "system" if message["role"] == "developer" else message["role"])):
            as_text, as_parts = (self._shows(template, settings, role, kind) for kind in ("text", "parts"))
            if as_parts and (as_text is False or message.get("content") is content):
                return {**message, "role": role, "content": content}
            if as_text or (as_text is None and not as_parts and role == message["role"] != "developer"):
                return {**message, "role": role, "content": text}
            if as_parts:
                return {**message, "role": role, "content": content}
        raise ConfigError(
            f"{name} has the role {message['role']}, whose content the model's chat template does not show; leave it "
            f"out or give it another role"
        )

    def _shows(self, template: str, settings: dict[str, Any], role: str, kind: str) -> bool | None:
        """Whether the template shows what a message of a role says, as text or as parts; None where it raises."""
        key = (template, role, kind)
        if key not in self._probes:
            probe: Message = {
                "role": role,
                "content": _PROBE if kind == "text" else [{"type": "text", "text": _PROBE}],
            }
            user = {"role": "user", "content": "a" if kind == "text" else [{"type": "text", "text": "a"}]}
            called = {"id": "a00000000", "type": "function", "function": {"name": "a", "arguments": {}}}
            calls = {"role": "assistant", "content": user["content"], "tool_calls": [called]}
            if role in ("tool", "function", "ipython"):
                probe |= {"tool_call_id": "a00000000", "name": "a"}
            around = {
                "user": [probe],
                "system": [probe, user],
                "developer": [probe, user],
                "assistant": [user, probe, user],
            }.get(role, [user, calls, probe])
            tokens = {name: value for name, value in settings.items() if name != "continue_final_message"}
            try:
                text = self._ask(template=template, messages=around, settings=tokens)
            except TemplateLimitError:
                raise
            except TemplateError:
                self._probes[key] = None
            else:
                # Some print a list as Python or JSON writes it.
                self._probes[key] = _PROBE in text and not _PRINTED_PART.search(text)
        return self._probes[key]

    def _first_that_renders(self, template: str, messages: list[Message], settings: dict[str, Any]) -> str:
        """With the arguments of tool calls as objects or else as JSON, and content absent or else empty."""
        errors: list[TemplateError] = []
        tried: list[list[Message]] = []
        for empties, as_objects in itertools.product((False, True), (True, False)):
            variant = [_variant(message, empties=empties, as_objects=as_objects) for message in messages]
            if variant in tried:
                continue
            tried.append(variant)
            try:
                return self._ask(template=template, messages=variant, settings=settings)
            except TemplateLimitError:
                raise
            except TemplateError as error:
                errors.append(error)
        raise errors[0]

    def _ask(self, **request: Any) -> Any:
        if self._num_ended >= _MOST_ENDED:
            raise TemplateLimitError(f"it went beyond its bounds {_MOST_ENDED} times and is not run again")
        try:
            return self._process.ask(**request)
        except TemplateError:
            self._num_ended += not self._process.is_running
            raise


def _checked_message(name: str, message: Any) -> Message:
    """A message as templates of transformers know them; ValueError for one that no chat request may hold."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} is {_shown(message)}; it must be an object with a role")
    # Templates test whether a key exists, so a null is removed.
    checked = {key: value for key, value in message.items() if value is not None}
    calls = checked.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"{name}.tool_calls is {_shown(calls)}; it must be a list of objects")
        for at, call in enumerate(calls):
            _check_call(f"{name}.tool_calls[{at}]", call)
    if "content" not in checked:
        if isinstance(checked.get("refusal"), str):
            checked["content"] = checked["refusal"]
        elif "content" not in message and not calls and "function_call" not in checked:
            raise ValueError(f"{name} has no content; give it some, or tool_calls")
        return checked
    content = checked["content"]
    if isinstance(content, list):
        checked["content"] = [_checked_part(f"{name}.content[{at}]", part) for at, part in enumerate(content)]
    elif not isinstance(content, str):
        raise ValueError(f"{name}.content is {_shown(content)}; it must be a text or a list of parts")
    return checked


def _checked_part(name: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{name} is {_shown(part)}; it must be an object with a type")
    if kind not in _TEXT_PARTS:
        raise ValueError(f"{name} is of type {kind}, and prompts are text alone; leave it out")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"{name}.{_TEXT_PARTS[kind]} is {_shown(text)}; it must be a text")
    return {"type": "text", "text": text}


def _check_call(name: str, call: dict[str, Any]) -> None:
    """Raises ValueError for what is no tool call; some have the function's fields at the top."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name} is {_shown(call)}; it must be an object with a function and its name")
    if not isinstance(_as_object(function.get("arguments")), dict):
        raise ValueError(
            f"{name} has the arguments {_shown(function['arguments'])}; they must be a JSON object, or the text of one"
        )


def _as_object(arguments: Any) -> Any:
    """The arguments of a tool call, which may be the text of a JSON object; None for a text of something else."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return None


def _variant(message: Message, *, empties: bool, as_objects: bool) -> Message:
    """The message with content even where it has none, and with arguments of tool calls as objects or as JSON."""
    changed = {**({"content": ""} if empties else {}), **message}
    if "tool_calls" in changed:
        changed["tool_calls"] = [_call_variant(call, as_objects=as_objects) for call in changed["tool_calls"]]
    return changed


def _call_variant(call: dict[str, Any], *, as_objects: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_objects:
        arguments = _as_object(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _objects(given: Mapping[str, Any], name: str) -> list[dict[str, Any]] | None:
    found = _checked(given, name, list, "a list of objects")
    if found and not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{name} is {_shown(found)}; it must be a list of objects")
    return found or None


def _checked(given: Mapping[str, Any], name: str, kind: type, rule: str) -> Any:
    value = given.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is {_shown(value)}; it must be {rule}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
