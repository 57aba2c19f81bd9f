"""Registries of choices by name: dispatch backends, experts, quantization methods and balancing policies.

An entry is a name, a "module:Class" string and one line of description. The module is imported when its name is
chosen, so a missing optional package affects only those who chose it, and the core does not depend on the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from moe_ep.errors import one_of

if TYPE_CHECKING:
    import torch  # not at run time: help and wrong options do not wait for it

# Stands for a choice by the caller; no entry may have this name.
_AUTO = "auto"


@dataclass(frozen=True)
class Entry:
    """One choice: where its class is, and a description in one line."""

    target: str
    summary: str


class Registry:
    """Names and the classes behind them, which are imported when chosen.

    Args:
        kind: the argument that takes such a name, for messages.
        contract: the "module:Class" that every choice must be a subclass of; empty if the choices are functions.

    Attributes:
        entries: the choices by name, in order.

    Example:
        >>> EXPERTS.load("reference")          # imports moe_ep.kernels.reference
        >>> EXPERTS.register("mine", "my_package.experts:MyExperts", "what it does")
    """

    def __init__(self, kind: str, entries: dict[str, Entry], contract: str = "") -> None:
        self.kind = kind
        self.contract = contract
        self.entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Entry:
        self.check(name)
        return self.entries[name]

    def register(self, name: str, target: str, summary: str) -> None:
        """Adds or replaces a choice; `target` is "module:Class".

        Raises:
            ValueError: a target that does not read so, or a name that is no text, empty or "auto".
        """
        if not isinstance(name, str) or name in ("", _AUTO):
            raise ValueError(f"name is {name!r}; it must be the text to choose by, and not {_AUTO!r}, which chooses")
        if not isinstance(target, str) or [bool(part) for part in target.split(":")] != [True, True]:
            raise ValueError(f"target is {target!r}; it must read 'module:Class', which is imported when it is chosen")
        self.entries[name] = Entry(target, summary)

    def check(self, name: str, also: tuple[str, ...] = ()) -> None:
        """Raises ValueError, listing the known names, unless `name` is known or one of `also`."""
        if name not in [*self.entries, *also]:  # it may be of any type
            raise ValueError(one_of(self.kind, name, [*also, *self.entries]))

    def name_of(self, choice: Any) -> str:
        """The name of an instance's class, or its "module:Class" if it is not registered."""
        target = f"{type(choice).__module__}:{type(choice).__name__}"
        return next((name for name, entry in self.entries.items() if entry.target == target), target)

    def load(self, name: str) -> Any:
        """Imports and returns the class behind `name`.

        Raises:
            ValueError: an unknown name; the known ones are listed.
            ImportError: its module cannot be imported, or has no such class.
            TypeError: the class is not a subclass of the contract.
        """
        target = self[name].target
        try:
            found = _find(target)
        except ModuleNotFoundError as error:
            if not f"{target.partition(':')[0]}.".startswith(f"{error.name}."):
                raise
            raise ModuleNotFoundError(
                f"{self.kind} {name!r} is {target} and there is no module {error.name!r}; every worker must be able to "
                f"import it: install it, or put its folder on PYTHONPATH",
                name=error.name,
            ) from None
        if self.contract and not (isinstance(found, type) and issubclass(found, _find(self.contract))):
            raise TypeError(f"{self.kind} {name!r} is {target}; it must be a subclass of {self.contract}")
        return found


def _find(target: str) -> Any:
    module, attribute = target.split(":")
    imported = importlib.import_module(module)
    if not hasattr(imported, attribute):
        raise ImportError(f"{module} has no {attribute!r}; register the name of a class that it has")
    return getattr(imported, attribute)


P = ParamSpec("P")
R = TypeVar("R")
Form = TypeVar("Form", bound=Callable[..., Any])


def choose_form(plain: Form, kernel: Form | str, *tensors: torch.Tensor, needs: str = "triton") -> Form:
    """The kernel if all tensors are on GPUs and not empty and what it needs is there, otherwise the plain-torch form.

    Both take the same arguments and return the same; the plain form is the reference.

    Args:
        kernel: a function of moe_ep.kernels, or for the core, which must not import it, "module:function" in there.
        needs: "triton", or "nvrtc" for CUDA sources.
    """
    if not all(tensor.is_cuda and tensor.numel() for tensor in tensors) or not _is_there(needs):
        return plain
    return _kernel(kernel) if isinstance(kernel, str) else kernel


class Operator(Generic[P, R]):
    """A function with two forms, called as one: `plain` on any device, and the kernel for tensors on a GPU.

    Args:
        plain: the form in plain torch, which documents the arguments and is the reference.
        chosen_by: names of the tensors that must be on a GPU and not empty for the kernel (see choose_form).
        suits: whether the kernel takes such tensors; None if it takes all.
    """

    def __init__(
        self, plain: Callable[P, R], chosen_by: tuple[str, ...], suits: Callable[[torch.Tensor], bool] | None
    ) -> None:
        self.plain = self.kernel = plain
        self._positions = [list(inspect.signature(plain).parameters).index(name) for name in chosen_by]
        self._suits = suits

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors: list[Any] = [args[position] for position in self._positions]
        if self._suits is not None and not all(map(self._suits, tensors)):
            return self.plain(*args, **kwargs)
        return choose_form(self.plain, self.kernel, *tensors)(*args, **kwargs)

    def on_gpu(self, kernel: Form) -> Form:
        """Decorates the kernel's form, whose arguments are the plain one's, not checked."""
        self.kernel = kernel
        return kernel


def operator(
    *chosen_by: str, suits: Callable[[torch.Tensor], bool] | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorates the plain form of an `Operator`."""
    return lambda plain: Operator(plain, chosen_by, suits)


@cache
def _is_there(package: str) -> bool:
    if package == "triton":
        return importlib.util.find_spec("triton") is not None
    return importlib.import_module("moe_ep.kernels.jit").unusable_reason() is None


@cache
def _kernel(target: str) -> Any:
    return _find(f"moe_ep.kernels.{target}")


ALL2ALL_BACKENDS = Registry(
    "all2all_backend",
    contract="moe_ep.modular_kernel.contracts:FusedMoEPrepareAndFinalize",
    entries={
        "no_ep": Entry("moe_ep.dispatch.no_ep:NoEPPrepareFinalize", "one rank, nothing is sent"),
        "allgather_reducescatter": Entry(
            "moe_ep.dispatch.allgather_reducescatter:AllGatherReduceScatterPrepareFinalize",
            "every rank sees every token; simplest, any transport",
        ),
        "all_to_all": Entry(
            "moe_ep.dispatch.all_to_all:AllToAllPrepareFinalize",
            "exact sizes, a token is sent once to each destination rank; prefill and across hosts",
        ),
        "batched_all_to_all": Entry(
            "moe_ep.dispatch.batched_all_to_all:BatchedAllToAllPrepareFinalize",
            "fixed capacity, no host synchronisation, CUDA-graph capturable; decode",
        ),
        "nvshmem_low_latency": Entry(
            "moe_ep.dispatch.nvshmem.low_latency:LowLatencyPrepareFinalize",
            "GPUs of one host write into each other's memory, one kernel each way, CUDA-graph capturable; decode",
        ),
        "nvshmem_high_throughput": Entry(
            "moe_ep.dispatch.nvshmem.high_throughput:HighThroughputPrepareFinalize",
            "GPUs of one host write rows where the others' experts read them, few SMs; prefill",
        ),
        "two_level": Entry(
            "moe_ep.dispatch.two_level:TwoLevelPrepareFinalize",
            "a token is sent once to each host, then to that host's ranks; prefill across hosts",
        ),
    },
)

EXPERTS = Registry(
    "experts",
    contract="moe_ep.modular_kernel.contracts:FusedMoEPermuteExpertsUnpermute",
    entries={
        "reference": Entry("moe_ep.kernels.reference:ReferenceExperts", "plain torch, Standard format"),
        "batched_reference": Entry(
            "moe_ep.kernels.reference:BatchedReferenceExperts", "plain torch, BatchedExperts format"
        ),
        "grouped": Entry(
            "moe_ep.kernels.grouped.experts:GroupedExperts", "plain f16 and bf16 weights on GPUs, Standard format"
        ),
        "batched_grouped": Entry(
            "moe_ep.kernels.grouped.experts:BatchedGroupedExperts",
            "plain f16 and bf16 weights on GPUs, BatchedExperts format",
        ),
        "marlin": Entry(
            "moe_ep.kernels.marlin.experts:MarlinExperts", "packed 4- and 8-bit weights on GPUs, Standard format"
        ),
        "batched_marlin": Entry(
            "moe_ep.kernels.marlin.experts:BatchedMarlinExperts",
            "packed 4- and 8-bit weights on GPUs, BatchedExperts format",
        ),
    },
)

QUANT_METHODS = Registry(
    "quant_method",
    contract="moe_ep.layer.methods.base:FusedMoEMethodBase",
    entries={
        "none": Entry("moe_ep.layer.methods.base:UnquantizedFusedMoEMethod", "f32, f16 or bf16 weights"),
        **{
            name: Entry("moe_ep.layer.methods.checkpoint:CheckpointFusedMoEMethod", summary)
            for name, summary in (
                ("gptq", "4- and 8-bit integers with group scales"),
                ("awq", "4-bit integers with zero points"),
                ("pack-quantized", "4- and 8-bit integers of compressed-tensors"),
                ("int-quantized", "signed bytes with a scale a row"),
                ("w4afp8", "4-bit integers, two to a signed byte, with group scales"),
                ("fp8", "e4m3 with scales of blocks, rows or the whole"),
                ("mxfp4", "e2m1 in groups of 32"),
                ("nvfp4", "e2m1 in groups of 16 with a second scale"),
                ("mixed-precision", "w13 and w2 in different ones of these"),
            )
        },
        "synthetic": Entry("moe_ep.bench.layers:SyntheticFusedMoEMethod", "made-up weights, for benchmarks"),
        "online_int": Entry(
            "moe_ep.layer.methods.canonical:OnlineFusedMoEMethod", "plain weights, quantized to integers on load"
        ),
        "online_fp8": Entry(
            "moe_ep.layer.methods.canonical:OnlineFusedMoEMethod", "plain weights, quantized to e4m3 on load"
        ),
    },
)

EPLB_POLICIES = Registry(
    "policy",
    {
        "incremental": Entry(
            "moe_ep.eplb.policy.incremental:plan", "lowest maximum rank load, reached from the present with few moves"
        ),
        "deepseek": Entry("moe_ep.eplb.policy.deepseek:plan", "DeepSeek's balancer; the present placement is ignored"),
    },
)
