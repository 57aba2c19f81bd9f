"""Checkpoints that are damaged or that nobody here reads: one sentence each, before a layer runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.format_cases import CASES, write_case

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
FUSED_OF_LANGUAGE = FUSED.replace("model.", "model.language_model.", 1)
Change = Callable[[Path], None]


def index_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "model.safetensors.index.json").read_text())


def truncated(directory: Path) -> None:
    shard = directory / index_of(directory)["weight_map"][f"{EXPERT}.qweight"]
    shard.write_bytes(shard.read_bytes()[:-64])


def moved_in_the_index(directory: Path) -> None:
    index = index_of(directory)
    shards = sorted(set(index["weight_map"].values()))
    at = shards.index(index["weight_map"][f"{EXPERT}.qweight"])
    index["weight_map"][f"{EXPERT}.qweight"] = shards[(at + 1) % len(shards)]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    """Changes one tensor, or leaves it out."""

    def apply(directory: Path) -> None:
        index = index_of(directory)
        file = directory / index["weight_map"][name]
        tensors = load_file(file)
        changed = change(tensors[name])
        if changed is None:
            del tensors[name], index["weight_map"][name]
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            tensors[name] = changed.contiguous()
        save_file(tensors, file)

    return apply


def gone(name: str) -> Change:
    return tensor(name, lambda found: None)


def not_a_number(name: str) -> Change:
    def change(found: torch.Tensor) -> torch.Tensor:
        wrong = found.clone().float().flatten()
        wrong[-1] = float("nan")
        return wrong.view(found.shape).to(found.dtype)

    return tensor(name, change)


def setting(**changes: Any) -> Change:
    """Changes quantization_config, or keys of the config named with a leading underscore."""

    def apply(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        for key, value in changes.items():
            if key.startswith("_"):
                config[key[1:]] = value
            else:
                config["quantization_config"][key] = value
        file.write_text(json.dumps(config))

    return apply


def group(**changes: Any) -> Change:
    """Changes the weights of the first config group."""

    def apply(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
        file.write_text(json.dumps(config))

    return apply


DAMAGED: dict[str, tuple[str, Change, str]] = {
    "truncated shard": ("awq", truncated, r"safetensors: tensor .*found a file of .*; it is truncated"),
    "flipped index entry": ("awq", moved_in_the_index, f"tensor {EXPERT}.qweight: expected here by the index, found"),
    "wrong dtype": (
        "awq",
        tensor(f"{EXPERT}.qweight", lambda found: found.float()),
        f"tensor {EXPERT}.qweight: expected torch.int32, found torch.float32",
    ),
    "wrong dtype of codes": (
        "fp8 rows",
        tensor(f"{EXPERT}.weight", lambda found: found.view(torch.float8_e5m2)),
        f"tensor {EXPERT}.weight: expected torch.float8_e4m3fn, found torch.float8_e5m2",
    ),
    "fused wrong dtype": (
        "mxfp4 gpt-oss",
        tensor(f"{FUSED}_scales", lambda found: found.to(torch.int32)),
        r"gate_up_proj_scales\[0\]: expected torch.uint8 or torch.float8_e8m0fnu, found torch.int32",
    ),
    "wrong shape": (
        "nvfp4 packed",
        tensor(f"{EXPERT}.weight_scale", lambda found: found[:, :-1]),
        rf"tensor {EXPERT}.weight_scale: expected shape \(32, 4\), found \(32, 3\)",
    ),
    "fused wrong shape": (
        "mxfp4 gpt-oss",
        tensor(f"{FUSED}_blocks", lambda found: found[:, :-2]),
        r"gate_up_proj_blocks: expected shape \(4, 64, 32\), found \(4, 62, 2, 16\)",
    ),
    "fused wrong numbers": (
        "nvfp4 modelopt fused rows",
        tensor(f"{FUSED_OF_LANGUAGE}_weight_scale_2", lambda found: found[:-1]),
        r"gate_up_proj_weight_scale_2: expected shape \(4, 2, 1\) or \(4, 1, 1\) or \(\), found \(3, 2\)",
    ),
    "fused missing number": (
        "nvfp4 modelopt fused columns",
        gone(f"{FUSED_OF_LANGUAGE}_weight_scale_2"),
        f"expected tensor {FUSED_OF_LANGUAGE}_weight_scale_2, found none",
    ),
    "missing scale": ("fp8 blocks", gone(f"{EXPERT}.weight_scale_inv"), f"expected tensor {EXPERT}.weight_scale_inv"),
    "fused missing scale": ("mxfp4 gpt-oss", gone(f"{FUSED}_scales"), f"expected tensor {FUSED}_scales, found none"),
    "missing order of one expert": (
        "packed int4 act-order",
        gone(f"{EXPERT.replace('up', 'down')}.weight_g_idx"),
        f"expected tensor {EXPERT.replace('up', 'down')}.weight_g_idx, found none",
    ),
    "missing second scale": (
        "nvfp4 modelopt",
        gone(f"{EXPERT}.weight_scale_2"),
        f"tensor {EXPERT}.weight_scale_2, found",
    ),
    "NaN scale": (
        "fp8 blocks",
        not_a_number(f"{EXPERT}.weight_scale_inv"),
        f"tensor {EXPERT}.weight_scale_inv: expected finite numbers, found NaN",
    ),
    "NaN scale of e4m3": (
        "nvfp4 packed",
        not_a_number(f"{EXPERT}.weight_scale"),
        f"tensor {EXPERT}.weight_scale: expected finite numbers, found NaN",
    ),
    "NaN scale of e8m0": (
        "mxfp4 per expert",
        tensor(f"{EXPERT}.weight_scale", lambda found: torch.full_like(found, 255)),
        f"tensor {EXPERT}.weight_scale: expected finite numbers, found NaN",
    ),
    "NaN scale of GPTQ": ("gptq 4 bits", not_a_number(f"{EXPERT}.scales"), f"tensor {EXPERT}.scales: expected finite"),
    "no second scale": (
        "nvfp4 packed",
        tensor(f"{EXPERT}.weight_global_scale", torch.zeros_like),
        "weight_global_scale: expected a positive number, found 0.0",
    ),
    "another shape than weight_shape": (
        "packed int4",
        tensor(f"{EXPERT}.weight_shape", lambda found: found + 1),
        rf"tensor {EXPERT}.weight_shape: expected \[32, 64\], found \[33, 65\]",
    ),
    "gate and up in different orders": (
        "packed int4 act-order",
        tensor(f"{EXPERT}.weight_g_idx", lambda found: found * 0 + 2),
        f"{EXPERT}.weight_g_idx: expected what the other half of w13 has",
    ),
    "fewer experts": ("awq", setting(_num_experts=3), "expected 3 experts as config.json says, found 4; expert 3"),
    "more experts": (
        "awq",
        setting(_num_experts=5),
        "expected 5 experts as config.json says, found 4; expert 4 is missing",
    ),
    "fewer fused experts": ("mxfp4 gpt-oss", setting(_num_local_experts=3), r"expected shape \(3, 64, 32\), found \(4"),
    "more fused experts": ("mxfp4 gpt-oss", setting(_num_local_experts=5), r"expected shape \(5, 64, 32\), found \(4"),
    "unknown method": ("awq", setting(quant_method="exl3"), "quant_method is 'exl3'; it must be one of gptq, awq, "),
    "AWQ gemv": ("awq", setting(version="gemv"), "version is 'gemv'; it must be one of gemm"),
    "AWQ of 3 bits": ("awq", setting(bits=3), "bits is 3; it must be one of 4"),
    "another 8-bit float": ("fp8 blocks", setting(fmt="e5m2"), "fmt is 'e5m2'; it must be one of e4m3"),
    "blocks of one number": ("fp8 blocks", setting(weight_block_size=[128]), r"weight_block_size is \[128\]; it must"),
    "sparse": ("packed int4", setting(sparsity_config={"format": "sparse-24"}), "format is 'sparse-24'"),
    "no groups": ("packed int4", setting(config_groups={}), "expected config_groups with a scheme in it"),
    "another format": ("packed int4", setting(format="marlin-24"), "group_0: format is 'marlin-24'; it must be one of"),
    "packed 3 bits": ("packed int4", group(num_bits=3), "group_0: weights of 3 bits"),
    "asymmetric bytes": ("int8", group(symmetric=False), "group_0: symmetric of the weights is False"),
    "group of another size": ("nvfp4 packed", group(group_size=32), "group_0: group_size of the weights is 32"),
    "another strategy": ("packed int4", group(strategy="attention"), "group_0: strategy is 'attention'; it must"),
    "fused in another format": (
        "mxfp4 gpt-oss",
        setting(quant_method="awq", bits=4, group_size=32),
        "gate_up_proj: expected a tensor for each expert, found all in one, .* plain form, .*, not as awq",
    ),
    "fused gate and up in one block": (
        "fp8 blocks fused columns",
        setting(weight_block_size=[96, 96]),
        "gate_up_proj: expected gate rows and then up rows, each a multiple of 96, .*; found 128 of each",
    ),
    "no expression": ("packed int4", setting(ignore=["re:("]), r"expected a regular expression, found '\('"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_one_sentence_before_anything_runs(tmp_path: Path, damage: str) -> None:
    name, change, message = DAMAGED[damage]
    write_case(name, tmp_path, with_values=False)
    change(tmp_path)
    ran = []
    with pytest.raises(CheckpointError, match=message) as raised:
        reader = CheckpointReader(tmp_path)
        spec = model_spec(reader.config)
        stack = MoEStack(reader, spec, FusedMoEParallelConfig(), dtype=torch.float32)
        ran.append(stack(torch.ones(1, spec.hidden_size)))
    assert not ran
    text = str(raised.value)
    assert "\n" not in text and not text.endswith(".")
    assert str(tmp_path) in text or text.startswith("config.json: ")


def test_what_is_wrong_with_the_last_layer_is_said_before_the_first_is_read(tmp_path: Path) -> None:
    write_case("awq", tmp_path, with_values=False)
    gone(f"{EXPERT}.scales")(tmp_path)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match=f"expected tensor {EXPERT}.scales"):
        MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig(), dtype=torch.float32)
    assert reader.bytes_read == 0


def test_every_case_is_whole_where_nothing_is_damaged(tmp_path: Path) -> None:
    for name in {name for name, _, _ in DAMAGED.values()}:
        write_case(name, tmp_path / name, with_values=False)
        reader = CheckpointReader(tmp_path / name)
        spec = model_spec(reader.config)
        stack = MoEStack(reader, spec, FusedMoEParallelConfig(), dtype=torch.float32)
        assert stack(torch.ones(1, spec.hidden_size)).isfinite().all()
    assert set(CASES) >= {name for name, _, _ in DAMAGED.values()}
