"""What a MoE layer runs on, its dispatch backend and its experts, both created when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from moe_ep.distributed.process_groups import LayerGroups, is_initialized, layer_groups
from moe_ep.layer.custom_ops import register_layer
from moe_ep.layer.expert_shard import FIRST_USE, ExpertShard
from moe_ep.layer.wrappers import check_not_broadcast, check_not_sharded
from moe_ep.modular_kernel import FusedMoEModularKernel, FusedMoEPrepareAndFinalize

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE

_NO_MEMORY = (0,)


class LayerParts(ExpertShard):
    """One rank's experts, connected to the other ranks of the layer.

    Attributes:
        groups: the layer's process groups.
        shared_experts: a module whose output is added, or None.
        dispatch_dtype: dtype of rows on the wire; None for that of the activations.
        input_dtype: what experts may round rows to; None for nothing.
    """

    # The attributes that hold modular kernels, and backends.
    _kernels: ClassVar[tuple[str, ...]] = ("_modular_kernel",)
    _backends: ClassVar[tuple[str, ...]] = ("_prepare_finalize",)

    # Which of torch's wrappers was found not to touch it.
    _wrapper = 0

    # The addresses of the tensors that the modular kernels were made for.
    _made_for: tuple[int, ...] = ()

    groups: LayerGroups
    shared_experts: nn.Module | None
    dispatch_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    _router: nn.Module | None
    _routers_bias: nn.Parameter | None

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        """Finds the layer's ranks, and creates the backend if they have met already."""
        self.groups = layer_groups(self.parallel_config, process_group)
        self._modular_kernel: FusedMoEModularKernel | None = None
        self._prepare_finalize: FusedMoEPrepareAndFinalize | None = None
        # A term that every rank holds in full: all ranks add it to complete outputs, only one to partial sums.
        self._takes_complete_terms = True
        if is_initialized() or not self._spans_ranks():
            self._make_prepare_finalize()

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the ranks must know each other's number of tokens."""
        return self.groups.ep is not None and self.prepare_finalize.max_num_tokens_per_rank() is not None

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend that moves this layer's rows."""
        if self._prepare_finalize is not None:
            return self._prepare_finalize
        try:
            return self._make_prepare_finalize()
        except AttributeError as error:
            raise RuntimeError(f"the backend of {self.layer_name} cannot be made: {error}") from error

    def _make_prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        if self._spans_ranks() and not is_initialized():
            raise RuntimeError(
                f"the layer {self.layer_name} is one of {self.parallel_config.tp_size * self.parallel_config.dp_size} "
                f"ranks and torch.distributed is not initialised; call init_process_group before making the layer"
            )
        if self.groups.are_none:  # also where the layer was made before its ranks met
            self.groups = layer_groups(self.parallel_config)
        with torch.device("cpu"):  # Its tables need values even if the layer is created on the meta device.
            self._prepare_finalize = self.quant_method.maybe_make_prepare_finalize(self.groups.ep, self.dispatch_dtype)
        self._takes_complete_terms = self.must_reduce_shared_expert_outputs() or self.parallel_config.tp_rank == 0
        return self._prepare_finalize

    def _spans_ranks(self) -> bool:
        return self.parallel_config.use_ep or self.parallel_config.tp_size > 1

    @property
    def modular_kernel(self) -> FusedMoEModularKernel:
        """The backend joined with the experts; created once the weights are ready."""
        kernel = self._modular_kernel
        if kernel is None:
            with FIRST_USE:
                kernel = self._modular_kernel
                if kernel is None:
                    kernel = self._make_kernel()
                    self._keep_kernel("_modular_kernel", kernel)
        return kernel

    def _keep_kernel(self, name: str, kernel: FusedMoEModularKernel) -> None:
        try:
            addresses = tuple(self._addresses())
        except RuntimeError:  # as of torch.export, which asks here and does not run the kernel
            addresses = _NO_MEMORY
        if addresses != self._made_for:
            self._forget_kernels()
            self._made_for = addresses
        # Not as a submodule: its shared experts are the layer's, and would be saved twice.
        self.__dict__[name] = kernel

    def _forget_kernels_of_others(self) -> None:
        """Drops the modular kernels that were made for other tensors: `torch.func.functional_call`, an assignment to
        `.data`, and wrappers that write to `_parameters` replace them without telling the layer.

        Raises:
            RuntimeError: a transform of torch.func is over the layer's own tensors.
        """
        try:
            addresses = tuple(self._addresses())
        except RuntimeError as error:
            raise RuntimeError(
                f"a transform of torch.func is over tensors of {self.layer_name}; its experts are for inference, so "
                f"take grad, jvp and vmap over others, and pass plain tensors for these"
            ) from error
        if self._made_for not in ((), addresses):
            self._forget_kernels()

    def _addresses(self) -> Iterator[int]:
        """Of the layer's tensors, some of which modular kernels keep references to."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None:
                yield tensor.data_ptr()

    def supports_cuda_graph(self) -> bool:
        """Whether a pass can be captured in a CUDA graph while other ranks run eagerly; makes backend and experts
        ready."""
        # A captured dispatch asks no rank for its number of tokens.
        return not self.parallel_config.use_all2all and self._parts_support_cuda_graph()

    def _parts_support_cuda_graph(self) -> bool:
        return self.prepare_finalize.supports_cuda_graph() and self.modular_kernel.fused_experts.supports_cuda_graph()

    def check(self) -> None:
        """DispatchTimeoutError where a kernel of this rank's that has ended waited for another rank in vain; waits for
        nothing. Eager passes begin with it. Whoever replays a CUDA graph calls it behind what waits for the results."""
        for name in self._backends:
            if (backend := getattr(self, name)) is not None:
                backend.check()

    @property
    def rounds_rows_to(self) -> torch.dtype | None:
        """What the layer's experts may round rows to; None if they do not."""
        return self.input_dtype if self.modular_kernel.fused_experts.may_round_rows() else None

    def _make_kernel(self) -> FusedMoEModularKernel:
        try:
            self.process_weights_after_loading()
            experts = self.quant_method.select_gemm_impl(self.prepare_finalize, cast("FusedMoE", self))
            return FusedMoEModularKernel(self.prepare_finalize, experts, self.shared_experts)
        except AttributeError as error:
            # nn.Module would report it as a missing attribute of the layer.
            raise RuntimeError(f"the experts of {self.layer_name} cannot be made: {error}") from error

    def _forget_kernels(self) -> None:
        """Drops the modular kernels, whose experts keep references to scales and biases that are being replaced."""
        self.__dict__.update(dict.fromkeys(self._kernels))

    @property
    def e_score_correction_bias(self) -> torch.Tensor | None:
        """The router's bias, `[E]`, or None; can be reassigned, as a tensor or as the router that has it."""
        if self._router is not None:
            return cast(torch.Tensor, self._router.e_score_correction_bias)
        return self._buffers["_own_bias"] if self._routers_bias is None else self._routers_bias

    @e_score_correction_bias.setter
    def e_score_correction_bias(self, bias: torch.Tensor | nn.Module | None) -> None:
        """Keeps a router or its parameter itself, so that what is loaded into them arrives here; any other tensor
        becomes a buffer and moves with the layer. None of them is saved with the layer."""
        if not (bias is None or isinstance(bias, torch.Tensor) or hasattr(bias, "e_score_correction_bias")):
            raise TypeError(
                f"e_score_correction_bias is a {type(bias).__name__}; it must be a tensor, a router that has an "
                f"attribute e_score_correction_bias, or None"
            )
        # Not as a parameter and a submodule of this layer.
        self.__dict__["_router"] = bias if isinstance(bias, nn.Module) else None
        self.__dict__["_routers_bias"] = bias if isinstance(bias, nn.Parameter) else None
        own = bias.detach() if isinstance(bias, torch.Tensor) and not isinstance(bias, nn.Parameter) else None
        self.register_buffer("_own_bias", own, persistent=False)

    def _bias_on(self, device: torch.device) -> torch.Tensor | None:
        bias = self.e_score_correction_bias
        if bias is None:
            return None
        if bias.is_meta:
            raise RuntimeError(
                f"e_score_correction_bias of {self.layer_name} has no values, as it was made on the meta device; "
                f"assign the router's, layer.e_score_correction_bias = ..."
            )
        return bias.to(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._forget_kernels()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "e_score_correction_bias":  # which nn.Module would register
            object.__setattr__(self, name, value)
            return
        if name in self._parameters and self._spans_ranks():
            check_not_sharded(name, value)
        # load_state_dict(assign=True) does this.
        if isinstance(value, torch.Tensor) and (name in self._parameters or name in self._buffers):
            self._forget_kernels()
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._spans_ranks():
            check_not_sharded(name, param)
        super().register_parameter(name, param)

    def check_own_experts(self) -> None:
        """ConfigError where a wrapper of torch has overwritten this rank's experts by another's."""
        if self._spans_ranks():
            self.__dict__["_wrapper"] = check_not_broadcast(self, self.layer_name, self._wrapper)

    def __getstate__(self) -> dict[str, Any]:
        """A copy creates its own modular kernels, since this layer's keep references to its weights."""
        return {**self.__dict__, **dict.fromkeys(self._kernels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a separate layer and gets a name of its own."""
        super().__setstate__(state)
        self.layer_name = self.loader.name = register_layer(self, self.layer_name)

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether the combine step returns complete sums. No all-reduce follows it then, so partial sums of shared
        experts must be reduced separately."""
        return self.prepare_finalize.output_is_reduced()

    def maybe_all_reduce_tensor_model_parallel(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the TP ranks, in place, if the layer's outputs are partial sums; otherwise returns `x`."""
        if not self.must_reduce_shared_expert_outputs() and self.groups.tp is not None:
            dist.all_reduce(x, group=self.groups.tp)
        return x


def moe_layers(layers: Iterable[FusedMoE]) -> list[FusedMoE]:
    """The layers as a list, those inside what torch.compile made of one; TypeError where they are something else."""
    wanted = "it must be a model's MoE layers, as [layer]"
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is a {type(layers).__name__}; {wanted}")
    found = [getattr(layer, "_orig_mod", layer) for layer in layers]
    for layer in found:
        if not isinstance(layer, LayerParts):
            raise TypeError(f"layers has a {type(layer).__name__}; {wanted}")
    return found
