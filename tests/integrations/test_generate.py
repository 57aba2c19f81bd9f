"""Text generation over ranks against transformers in one process, and what the command says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.integrations.decoder import SlotDecoder
from moe_ep.integrations.divided import steps_of
from moe_ep.integrations.generation import Completion, Generation, Request
from moe_ep.integrations.perplexity import perplexity
from moe_ep.launch.cli import main
from moe_ep.launch.generate_config import read_prompts
from moe_ep.launch.generate_worker import _token_ids, _tokenizer
from tests.checkpoint.test_real_layer import text_moe
from tests.integrations.alone import continue_alone, load_alone
from tests.integrations.hf_models import SIZES, make_model
from tests.ranks import ranks

STOP = 5
NEW_TOKENS = 12
TRAINED_TOKENS = 16
# Within 0.1% of what text-moe's README says.
PERPLEXITY = {"english": 7.06, "python": 7.24}


def requests_of(rank: int) -> list[Request]:
    """Five prompts on rank 0, two on rank 1, none on rank 2; of 3 to 18 tokens."""
    generator = torch.Generator().manual_seed(rank)
    return [
        Request(index, torch.randint(1, SIZES["vocab_size"], (3 + 5 * (index % 4),), generator=generator))
        for index in range((5, 2, 0)[rank])
    ]


def generated(rank: int, world_size: int, family: str, options: dict[str, Any]) -> tuple[list[Completion], int]:
    model = moe_ep.parallelize(make_model(family), **options)
    generation = Generation(model, requests_of(rank), max_new_tokens=NEW_TOKENS, num_slots=2, stop_ids=[STOP])
    for layer in steps_of(model).layers:
        layer.counts_load = True
    completions = generation.run()
    return completions, sum(int(layer.load.sum()) for layer in steps_of(model).layers)


@pytest.mark.parametrize(
    ("family", "options"),
    [(family, {}) for family in ("Mixtral", "Qwen3Moe", "Qwen3Next", "DeepseekV3", "GptOss")]
    + [
        ("Qwen3Moe", {"backend": "all_to_all", "decode_max_num_tokens": 2}),
        ("Qwen3Moe", {"backend": "batched_all_to_all"}),
    ],
)
def test_slots_continue_as_transformers_alone(family: str, options: dict[str, Any]) -> None:
    alone = make_model(family)
    top_k, layers = SIZES["num_experts_per_tok"], len(list(alone.model.layers))
    for rank, (completions, load) in enumerate(ranks(3).run(generated, family, options)):
        requests = requests_of(rank)
        assert [completion.index for completion in completions] == [request.index for request in requests]
        for request, completion in zip(requests, completions, strict=True):
            prompt = request.token_ids[None]
            output = alone.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=STOP,
            )
            expected = output[0, prompt.size(1) :].tolist()
            assert completion.finish == ("stop" if STOP in expected else "length")
            assert completion.token_ids == [token for token in expected if token != STOP]
            assert completion.num_prompt_tokens == prompt.size(1)
        # Free slots go to no expert: the load is that of the prompts' tokens and of those decoded from.
        decoded = sum(len(c.token_ids) - (c.finish == "length") for c in completions)
        routed = sum(request.token_ids.numel() for request in requests) + decoded
        moe_layers = layers - getattr(alone.config, "first_k_dense_replace", 0)
        assert load == top_k * moe_layers * routed


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo checkpoint, in a cache folder of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model", progress=False)


def add_code(folder: Path) -> Path:
    """Puts code into a checkpoint and asks for it in every way that transformers knows; the file that it would make."""
    trace = folder / "code-was-run"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    for file, classes in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        settings = json.loads((folder / file).read_text())
        settings["auto_map"] = {name: [None, "own.Own"] if "Token" in name else "own.Own" for name in classes}
        (folder / file).write_text(json.dumps(settings))
    return trace


def test_the_command(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["def read(self, size):", "The list of", "import", "# A line", "return None"]
    folder = shutil.copytree(demo, tmp_path / "model")
    trace = add_code(folder)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": prompt, "id": f"p{i}", "kind": "mine"}) + "\n" for i, prompt in enumerate(prompts)
        )
    )
    flags = ["--launcher", "local", "--ep-size", "2", "--device", "cpu", "--batch-size", "2", "--max-new-tokens", "10"]
    assert main(["generate", "--model", str(folder), "--prompts", str(file), "--output", str(output), *flags]) == 0
    captured = capsys.readouterr()
    assert not captured.out and not trace.exists()
    *lines, summary = [json.loads(line) for line in output.read_text().splitlines()]
    alone, tokenizer = load_alone(demo), transformers.AutoTokenizer.from_pretrained(demo)
    for index, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        assert (line["kind"], line["index"], line["id"], line["rank"]) == ("completion", index, f"p{index}", index % 2)
        assert line["prompt"] == prompt
        assert line["text"] == continue_alone(alone, tokenizer, prompt, 10)
    assert summary["kind"] == "summary"
    assert summary["tokens_per_rank"] == [
        sum(line["num_tokens"] for line in lines if line["rank"] == rank) for rank in range(2)
    ]
    assert summary["tokens_per_s"] == pytest.approx(sum(summary["tokens_per_s_per_rank"]))
    assert 0 < summary["balancedness"] <= 1
    assert " tokens/s (" in captured.err and re.search(r"^ +1 +2 +\d+ .* MiB  .*, cpu$", captured.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prompts.txt", "\n\n", "prompts.txt: expected a prompt a line, found none"),
        (
            "prompts.jsonl",
            '"one"\n{"text": "two"}\n',
            'line 2: expected a string or an object with "prompt", found \'{"text": "two"}\'',
        ),
    ],
)
def test_prompts_that_are_none(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["generate", "--prompts", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_what_ends_a_line_elsewhere_may_stand_in_a_prompt(tmp_path: Path) -> None:
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes("\ufeffone\u2028 two\x0c\r\n\nthree".encode())
    objects.write_text('"one\u2028 two"\n\n{"prompt": "three", "id": 3}\n', encoding="utf-8")
    assert [prompt["prompt"] for prompt in read_prompts(text)] == ["one\u2028 two\x0c", "three"]
    assert read_prompts(objects) == [{"prompt": "one\u2028 two"}, {"prompt": "three", "id": 3}]
    objects.write_text('"one"\n\n{}\n')
    with pytest.raises(ValueError, match="line 3: expected a string"):
        read_prompts(objects)


def test_a_tokenizer_of_no_or_another_model(demo: Path, tmp_path: Path) -> None:
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(3, 1))
    with pytest.raises(ConfigError, match="prompt 7 has the token 5 and the model knows 3; the tokenizer is another"):
        _token_ids(lambda prompt: {"input_ids": [1, 5]}, model, 7, "x")
    shutil.copy(demo / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="(expected a|cannot read its) tokenizer"):
        _tokenizer(tmp_path)


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    model = moe_ep.parallelize(make_model("MiniMax", num_local_experts=6, layer_types=["full_attention"] * 2))
    with pytest.raises(ConfigError, match="a MiniMaxForCausalLM keeps its past in a cache of its own"):
        SlotDecoder(model, 1, 8, graphs=False)


def test_prompts_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == 2
    assert "--prompts is missing" in capsys.readouterr().err


needs_text_moe = pytest.mark.skipif(text_moe() is None, reason="text-moe is not here; MOE_EP_TEXT_MOE names its folder")


def of_text_moe(
    rank: int, world_size: int, folder: str, prompts: list[str]
) -> tuple[dict[str, float] | None, list[str]]:
    """Perplexities of the held-out text where it is there, and the continuations of this rank's prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = moe_ep.parallelize(folder, dtype=torch.float32)
    requests = [
        Request(index, tokenizer(prompt, return_tensors="pt")["input_ids"][0])
        for index, prompt in enumerate(prompts)
        if index % world_size == rank
    ]
    completions = Generation(model, requests, max_new_tokens=TRAINED_TOKENS, num_slots=1, stop_ids=[0]).run()
    texts = Path(folder).parents[1] / "data/heldout_text.json"
    measured = None
    if texts.is_file():
        tokens = {
            kind: [torch.tensor(tokenizer(text)["input_ids"][:1024]) for text in several]
            for kind, several in json.loads(texts.read_text()).items()
        }
        measured = perplexity(model, tokens)
    return measured, [tokenizer.decode(completion.token_ids) for completion in completions]


@needs_text_moe
def test_a_trained_model() -> None:
    folder = text_moe()
    prompts = ["The Linux kernel is", "def main(", "#include <"]
    results = ranks(2).run(of_text_moe, str(folder), prompts)
    alone, tokenizer = load_alone(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for index, prompt in enumerate(prompts):
        assert results[index % 2][1][index // 2] == continue_alone(alone, tokenizer, prompt, TRAINED_TOKENS)
    for measured, _ in results:
        if measured is not None:
            assert measured == pytest.approx(PERPLEXITY, rel=1e-3)
