"""Which checkpoint a gang computes, and how: the options that all commands with a model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moe_ep.launch.cli.option_values import BACKEND_NAMES, checkpoint_folder, read_model_config
from moe_ep.launch.cli.options import OptionError, one_of, one_of_these, option
from moe_ep.launch.gangs.gang_choice import GangConfig
from moe_ep.registry import ALL2ALL_BACKENDS

if TYPE_CHECKING:
    import torch

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def torch_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`; without it bf16 on GPUs and f32 on CPUs."""
    import torch

    return getattr(torch, DTYPES[name or ("bf16" if device.type == "cuda" else "f32")])


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GangConfig):
    """The model of a gang's workers, its number types, and how tokens travel."""

    options_title: ClassVar[str] = "model"

    model: Path | None = field(
        default=None,
        metadata=option(
            checkpoint_folder, "checkpoint folder; without it, a small Qwen3-MoE checkpoint that is made once", "DIR"
        ),
    )
    backend: str = field(
        default="auto",
        metadata=option(one_of_these(lambda: ("auto", *ALL2ALL_BACKENDS)), f"dispatch backend: {BACKEND_NAMES}"),
    )
    dtype: str | None = field(
        default=None,
        metadata=option(
            one_of(*DTYPES), "f32, f16 or bf16, for activations and plain weights (default: bf16 on GPUs, f32 on CPUs)"
        ),
    )
    quantize: str = field(
        default="none",
        metadata=option(
            one_of("none", "int4", "int8", "fp8"), "quantize plain experts while they load: int4, int8 or fp8"
        ),
    )

    allow_nonfinite: bool = field(
        default=False, metadata=option(None, "load weights that hold NaN or infinity too, which are refused otherwise")
    )

    def check_quantize(self) -> None:
        """Raises OptionError where --quantize is asked for a checkpoint that is quantized already."""
        if self.quantize == "none":
            return
        if self.model is None:
            raise OptionError(
                f"--quantize is {self.quantize!r}; the demo checkpoint is quantized already, pass --model"
            )
        if read_model_config(self.model).get("quantization_config") is not None:
            raise OptionError(f"--quantize is {self.quantize!r} and --model is quantized already; leave it out")
