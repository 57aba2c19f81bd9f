"""What parallelize and the models that it makes refuse, in a sentence."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch.nn.utils import parametrize

import moe_ep
import moe_ep.hf.parallelize  # registers moe_ep with transformers
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.hf.experts import find_experts
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.routed_experts import RoutedExperts
from tests.hf.hf_models import SIZES, make_model


def test_experts_that_a_pass_has_sharded_are_not_saved(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe")
    model.set_experts_implementation("moe_ep")
    with torch.inference_mode():
        model(torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(
        ConfigError, match="state_dict of model.layers.0.mlp.experts: a rank holds its own experts alone"
    ):
        model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the model cannot be pickled, nor saved by torch.save: a rank holds its own"):
        pickle.dumps(model)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts of .* were sharded by a pass .* load the model"):
        moe_ep.parallelize(model)
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match="experts_implementation is 'eager' and a pass with 'moe_ep' has sharded the"):
        model(torch.ones(1, 2, dtype=torch.int64))


def test_a_pass_that_is_refused_divides_nothing() -> None:
    model = make_model("Qwen3Moe")
    tokens = torch.ones(1, 2, dtype=torch.int64)
    with torch.no_grad():
        expected = model(tokens).logits
    model.set_experts_implementation("moe_ep")
    experts = model.model.layers[0].mlp.experts

    model.requires_grad_(True)

    def refused(error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=f"^the experts of (Parametrized)?Qwen3MoeExperts {words}"):
            model(tokens)
        assert "moe_ep" not in experts._modules and experts.down_proj.dim() == 3

    refused(RuntimeError, "with experts_implementation 'moe_ep' are for inference and have no backward")
    with torch.no_grad():
        # What accelerate puts on a module whose weights it takes away between passes.
        experts._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(offload=False), SimpleNamespace(offload=True)))
        refused(ConfigError, "are offloaded, .* load the model with a device_map that keeps them")
        del experts._hf_hook
        parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
        refused(ConfigError, r"have weights that are computed in each pass, .* merge the adapters first")
        parametrize.remove_parametrizations(experts, "down_proj")
        kept, experts.down_proj = experts.down_proj, torch.nn.Parameter(experts.down_proj.to("meta"))
        refused(ConfigError, "are on the meta device and have no values")
        experts.down_proj = kept
        model.set_experts_implementation("eager")
        assert torch.equal(model(tokens).logits, expected)


def test_a_model_without_experts_is_refused() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="LlamaForCausalLM and has no experts module"):
        moe_ep.parallelize(transformers.LlamaForCausalLM(config))
    quantized = transformers.LlamaForCausalLM(config)
    quantized.hf_quantizer = object()
    with pytest.raises(ConfigError, match="transformers has quantized it"):
        moe_ep.parallelize(quantized)
    with torch.device("meta"), pytest.raises(ConfigError, match="model is on the meta device"):
        moe_ep.parallelize(make_model("Qwen3Moe"))
    with pytest.raises(TypeError, match="model_or_path is a LlamaConfig"):
        moe_ep.parallelize(config)


def test_a_model_that_only_holds_others_is_refused() -> None:
    """As those that think with one language model and speak with another."""
    holder = torch.nn.Module()
    holder.thinker = make_model("Qwen3Moe")
    with pytest.raises(ConfigError, match="model is a Module, which makes no passes itself"):
        moe_ep.parallelize(holder)
    whole = make_model("DeepseekV3")
    layer = whole.model.layers[1]
    for part in (layer, layer.mlp, layer.mlp.experts):  # The last two have configurations.
        with pytest.raises(ConfigError, match=rf"model is a {type(part).__name__}, which is no model of transformers;"):
            moe_ep.parallelize(part)
    assert len(list(find_experts(whole))) == 1


def test_arguments_of_other_kinds_are_refused() -> None:
    for argument, value, message in (
        ("dtype", torch.float64, "dtype is torch.float64; it must be one of torch.bfloat16, "),
        ("device", "gpu", "device is 'gpu'; it must be a torch.device or the name of one"),
        ("device", "meta", "device is meta, which keeps no values"),
        ("device", "cuda:99", r"device is cuda:99 and this machine has \d+ GPUs"),
        ("eplb", "on", "eplb is 'on'; it must be an EplbConfig, True, False or None"),
        ("allow_nonfinite", "false", "allow_nonfinite is 'false'; it must be True or False"),
        ("decode_max_num_tokens", 0, "decode_max_num_tokens is 0; it must be at least 1"),
        ("decode_max_num_tokens", "8", "decode_max_num_tokens is '8'; it must be a whole number"),
        ("ep_size", "1", "ep_size is '1'; it must be a whole number"),
        ("on_layer", 3, r"on_layer is 3; it must be a function of \(layers loaded, layers\)"),
        ("dtype", "bf16", "dtype is 'bf16'; it must be a torch.dtype, as torch.bfloat16, or None"),
        (
            "attn_implementation",
            5,
            "attn_implementation is 5; it must be a name that transformers knows, as 'sdpa', or",
        ),
        ("membership", "x", r"membership is 'x'; it must be a moe_ep.distributed.membership.Membership, or None"),
        ("elastic", "x", "elastic is 'x'; it must be an ElasticConfig, or None for its defaults"),
        ("process_group", 3, "process_group is 3; it must be a torch.distributed.ProcessGroup, or None"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            moe_ep.parallelize(make_model("Qwen3Moe"), **{argument: value})


def test_a_config_that_transformers_cannot_use_is_refused(tmp_path: Path) -> None:
    """Of values that only transformers reads: some it checks, by others it fails while it makes the model."""
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name, value, error in (
        ("num_attention_heads", "4", "StrictDataclassFieldValidationError: .* expected int, got str"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("head_dim", -1, "RuntimeError: .*negative dimension"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, "TypeError"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | {name: value}))
        with pytest.raises(ConfigError, match=f"makes no model of it: {error}") as caught:
            moe_ep.parallelize(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_pass_without_input_fails_as_the_model_does() -> None:
    parallel = moe_ep.parallelize(make_model("Qwen3Moe"))
    with pytest.raises(ValueError, match="You must specify exactly one of input_ids or inputs_embeds"):
        parallel()
    assert steps_of(parallel).current is None


def test_what_only_a_path_can_have_is_refused_for_a_model() -> None:
    for name, value in {"dtype": torch.bfloat16, "attn_implementation": "eager"}.items():
        with pytest.raises(ConfigError, match=f"{name} is .* a Qwen3MoeForCausalLM, which has its own"):
            moe_ep.parallelize(make_model("Qwen3Moe"), **{name: value})


def test_a_model_is_parallelized_once_and_by_a_known_backend() -> None:
    model = make_model("Qwen3Moe")
    with pytest.raises(ValueError, match="all2all_backend is 'foo'"):
        moe_ep.parallelize(model, backend="foo")
    moe_ep.parallelize(model)
    for part in (model, model.model, model.model.layers[0]):
        with pytest.raises(ConfigError, match=f"the experts of this {type(part).__name__} are sharded already"):
            moe_ep.parallelize(part)


def test_no_part_of_a_parallelized_model_is_saved(tmp_path: Path) -> None:
    """Files of a rank's own experts would load without an error, and with experts of random numbers."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    for part in (model, model.model, copy.deepcopy(model).model):
        for save in (part.save_pretrained, part.push_to_hub):
            with pytest.raises(ConfigError, match="a rank of a parallelized model holds its own experts alone"):
                save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    assert moe_ep.serve(model.model) == 0


def test_a_model_of_own_code_or_pickles_is_refused(tmp_path: Path) -> None:
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    own = {"model_type": "own_moe", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings | own))
    with pytest.raises(CheckpointError, match="model_type is 'own_moe'"):
        moe_ep.parallelize(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin"):
        moe_ep.parallelize(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"has_post_expert_norm": True}, "are followed by a norm of their own; moe_ep does not take"),
        ({"act_fn": torch.nn.Tanh()}, "have the activation Tanh; moe_ep has silu, SiLU"),
        (
            {"act_fn": torch.nn.Tanh(), "has_gate": False},
            "have the activation Tanh; moe_ep has .*, ReLUSquaredActivation",
        ),
        ({"act_fn": torch.nn.GELU(approximate="tanh"), "has_gate": False}, "have the activation GELUTanh"),
    ],
)
def test_experts_of_another_kind_are_refused(flags: dict[str, Any], message: str) -> None:
    """In the last layer alone: those before it are not sharded either."""
    model = make_model("Qwen3Moe")
    experts = [module for _, module in find_experts(model)]
    for name, value in flags.items():
        setattr(experts[-1], name, value)
    with pytest.raises(ConfigError, match=message):
        moe_ep.parallelize(model)
    assert [module for _, module in find_experts(model)] == experts and len(experts) > 1


def test_experts_of_another_dtype_are_refused() -> None:
    model = make_model("Qwen3Moe")
    for _, module in find_experts(model):
        module.down_proj = torch.nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match="are torch.float8_e4m3fn and must be"):
        moe_ep.parallelize(model)


def test_a_gate_is_known_by_what_it_computes() -> None:
    for changed, known in ({}, True), ({"limit": 5.0}, True), ({"alpha": 1.0}, False):
        model = make_model("GptOss")
        for _, module in find_experts(model):
            module.__class__ = type("Mine", (type(module),), changed)
            for name in changed:
                delattr(module, name)
        if known:
            moe_ep.parallelize(model)
            layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
            assert {layer.moe_config.swiglu_limit for layer in layers} == {changed.get("limit")}
            continue
        with pytest.raises(ConfigError, match="of Mine have a gate .* none of moe_ep's activations, silu, .*swigluoai"):
            moe_ep.parallelize(model)


def test_a_gate_is_known_under_another_default_dtype() -> None:
    model = make_model("GptOss")
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe_ep.parallelize(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {layer.activation.value for layer in model.modules() if isinstance(layer, RoutedExperts)} == {"swigluoai"}


def test_experts_that_not_every_pass_calls_are_refused() -> None:
    model = make_model("Qwen3Moe")
    model.second = make_model("Qwen3Moe").model
    both = "layer 0 of the model has the experts model.layers.0.mlp.experts and second.layers.0.mlp.experts, of which"
    with pytest.raises(ConfigError, match=both):
        moe_ep.parallelize(model)


class Wrapper(torch.nn.Module):
    """As peft wraps experts whose parameters it adapts."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.weight = base_layer.down_proj


def test_experts_inside_another_module_are_refused() -> None:
    for wrap, words in (
        (Wrapper, r"experts.base_layer are inside a Wrapper, .*; merge the adapters first \(merge_and_unload"),
        (torch.compile, "experts._orig_mod are inside a OptimizedModule, .*; call torch.compile behind parallelize"),
    ):
        model = make_model("Qwen3Moe")
        layer = model.model.layers[1].mlp
        layer.experts = wrap(layer.experts)
        with pytest.raises(ConfigError, match=f"^the experts model.layers.1.mlp.{words}"):
            moe_ep.parallelize(model)
        assert not any(isinstance(part, RoutedExperts) for part in model.modules())


def test_a_parallelized_model_is_not_saved_nor_copied_nor_one_graph() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    for save in (model.save_pretrained, model.push_to_hub):
        with pytest.raises(ConfigError, match="holds its own experts alone, .* save the model before parallelize"):
            save("nowhere")
    with pytest.raises(ConfigError, match="cannot be pickled, nor saved by torch.save"):
        pickle.dumps(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="agree on the host; leave fullgraph out"):
        torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 2, dtype=torch.int64))
    steps_of(model).scheduler.size = 2
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(model)


def test_gradients_are_refused() -> None:
    parallel = moe_ep.parallelize(make_model("Qwen3Moe"))
    embedded = torch.zeros(1, 3, SIZES["hidden_size"], requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward"):
        parallel(inputs_embeds=embedded)


def test_a_model_that_was_not_parallelized_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_ep.parallelize"):
        steps_of(make_model("Qwen3Moe"))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moe_ep, "parallelize")
    for name in ("parallelize", "loading"):
        monkeypatch.delitem(sys.modules, f"moe_ep.hf.{name}")
    monkeypatch.delattr(moe_ep.hf, "loading")
    # None is how Python says that a module cannot be imported.
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"moe_ep\.parallelize needs transformers, which is not installed; run: pip install 'moe_ep\[hf\]'"
    with pytest.raises(ImportError, match=message):
        _ = moe_ep.parallelize


class Experts(torch.nn.Module):
    """With names and shapes as transformers' experts have them, and computed in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(7, 64, 64))
        self.down_proj = torch.nn.Parameter(torch.randn(7, 64, 32))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states


def test_experts_of_which_nothing_says_what_they_compute() -> None:
    model = make_model("Qwen3Moe")
    for layer in model.model.layers:
        layer.mlp.experts = Experts()
    with pytest.raises(ConfigError, match="has no experts module of transformers 5"):
        moe_ep.parallelize(model)
