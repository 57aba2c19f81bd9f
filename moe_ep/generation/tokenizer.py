"""The tokenizer of a checkpoint, as generation needs it: prompts to token ids, token ids to text, and what ends one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moe_ep.checkpoint.reader import read_json
from moe_ep.errors import ConfigError, check_paths
from moe_ep.generation.conversation import Conversation, ConversationRenderer
from moe_ep.hf.loading import context_length, text_config
from moe_ep.hf.untrusted import tokenizer_folder

# Of a text by a tokenizer's replacements; real ones write a character or two for one.
_MOST_GROWTH = 1000
# A prompt is a text or a conversation.
Prompt = str | Conversation


class ModelTokenizer:
    """Reads the tokenizer of a checkpoint's folder; nothing is fetched, and no code of the checkpoint is run.

    `close` ends the process that renders chat templates.

    Raises:
        CheckpointError: a config of the folder that is no JSON object.
        ConfigError: there is none that can be read without code of its own.
        TypeError: what is no path.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_paths(folder=folder)
        folder = Path(folder)
        of_text = text_config(folder)
        self.context_length = context_length(of_text)
        self._vocab_size = of_text.vocab_size
        self.tokenizer = _read_tokenizer(folder)
        self._renderer = ConversationRenderer(self.tokenizer)

    def close(self) -> None:
        self._renderer.close()

    def token_ids(self, prompt: Prompt) -> torch.Tensor:
        """int64 `[length]` of a prompt; ConfigError for one that the model cannot take."""
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        try:
            # A chat template writes special tokens itself.
            ids = self.tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"]
        except BaseException as error:  # half of a surrogate pair; or a panic of the library, which is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"the tokenizer does not read {text[:80]!r}: {error}") from None
        if not ids:
            raise ConfigError(f"{text[:80]!r} has no tokens; give it some text")
        if max(ids) >= self._vocab_size:
            raise ConfigError(
                f"it has the token {max(ids)} and the model knows {self._vocab_size}; the tokenizer is another model's"
            )
        if self.context_length is not None and len(ids) >= self.context_length:
            raise ConfigError(
                f"it has {len(ids)} tokens and the model reads {self.context_length}, continuation included; shorten it"
            )
        return torch.tensor(ids)

    def _render(self, conversation: Conversation) -> str:
        tokenizer = self.tokenizer
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return _render_by_itself(tokenizer, conversation)
        if tokenizer.chat_template is None and conversation.chat_template is None:
            way_out = "leave --chat out" if conversation.is_text else "give it as text"
            raise ConfigError(f"it is a conversation and the model's tokenizer has no chat template; {way_out}")
        return self._renderer.render(conversation)

    @property
    def end_ids(self) -> list[int]:
        """The token that ends an answer, if the tokenizer has one."""
        own = self.tokenizer.eos_token_id
        return [] if own is None else [own]

    def special_token(self, text: str) -> list[int]:
        """The id of the special token that `text` is: decoded text lacks it, so it would never come up there.

        Only what all tokenizers have tells: those of mistral_common do not list the tokens that were added.
        """
        index = self.tokenizer.convert_tokens_to_ids(text)
        # Tokenizers may return the id of the unknown token for a text that is no token.
        if index is None or self.tokenizer.convert_ids_to_tokens(index) != text:
            return []
        return [] if self.text([index]) else [index]

    def text(self, token_ids: list[int], stop: str | None = None) -> str:
        """The text of token ids, without special tokens, up to where `stop` comes up."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text if stop is None else text.partition(stop)[0]

    def ends_with(self, stop: str, token_ids: list[int]) -> bool:
        """Whether the last of these tokens completes `stop`."""
        # A token is a byte at least; a few more tokens, so that the first of these is whole.
        return stop in self.text(token_ids[-len(stop.encode()) - 4 :])


def _read_tokenizer(folder: Path) -> Any:
    with tokenizer_folder(folder) as files:
        try:
            tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a file makes it raise
            said = f"{type(error).__name__}: {error}".replace(str(files), str(folder)).splitlines()[0]
            raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {said}") from None
    _check_growth(folder, tokenizer)
    tokenizer.name_or_path = str(folder)
    # transformers makes an empty tokenizer of the model's kind if all files are missing.
    names = sorted(tokenizer.vocab_files_names.values())
    if not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"{folder}: expected a tokenizer ({' or '.join(names)}), found none; put it beside config.json"
        )
    # transformers reads this file only where tokenizer_config.json does not list the tokens.
    for name, token in _special_tokens(folder / "special_tokens_map.json").items():
        if name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES and getattr(tokenizer, name, None) is None:
            setattr(tokenizer, name, token)
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = processor_templates(folder)
    return tokenizer


def processor_templates(folder: Path) -> str | dict[str, str] | None:
    """The chat templates of a checkpoint's processor, which models that see keep for themselves: one, or several by
    name; None where it has none. Those of a tokenizer transformers reads.

    Raises:
        CheckpointError: a file that is no JSON object.
        ConfigError: one whose chat_template is no template.
    """
    for name in ("chat_template.json", "processor_config.json", "preprocessor_config.json"):
        file = folder / name
        found = read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(found, list) and all(isinstance(each, dict) for each in found):
            found = {each.get("name"): each.get("template") for each in found}
        texts = found.values() if isinstance(found, dict) else [found]
        if found is not None and not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                f"{file}: expected chat_template to be a template, or several by name, found something else"
            )
        if found is not None:
            return found
    return None


def _check_growth(folder: Path, tokenizer: Any) -> None:
    """ConfigError for replacements that, one after the other, make a short text take all memory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "decoder"):
        part, growth = getattr(backend, name, None), 1
        steps = [] if part is None else [json.loads(part.__getstate__())]
        for step in steps:
            growth *= max(1, len(step.get("content") or step.get("prepend") or ""))
            steps += step.get("normalizers") or step.get("decoders") or ()
        if growth > _MOST_GROWTH:
            raise ConfigError(
                f"{folder}: expected a tokenizer whose {name} makes a text at most {_MOST_GROWTH} times as long, found "
                f"{growth} times; correct its tokenizer.json"
            )


def _special_tokens(file: Path) -> dict[str, str]:
    """The special tokens that a special_tokens_map.json names; none where there is no such file."""
    found = read_json(file) if file.is_file() else {}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _render_by_itself(tokenizer: Any, conversation: Conversation) -> str:
    """For tokenizers that render conversations without a template, as those of mistral_common do."""
    begins = conversation.add_generation_prompt
    try:
        return tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=not conversation.continue_final_message if begins is None else begins,
            continue_final_message=conversation.continue_final_message,
            **{name: value for name, value in {"documents": conversation.documents}.items() if value},
            **conversation.variables,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model's tokenizer does not take the conversation: {error}") from None
