"""Which kernels compute the experts' two GEMMs and the activation between them.

Hopper has kernels of its own (hopper.py); GPUs from sm_80 on, and Hopper for what its own do not take, run those of
ampere.py. Both take weights in the one packed layout.
"""

from __future__ import annotations

import torch

from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.marlin import ampere, hopper
from moe_ep.kernels.marlin.pair import WeightPair
from moe_ep.kernels.marlin.params import Rows, experts_params

_HOPPER = (9, 0)
_OLDEST = (8, 0)


def partials_numel(max_rows: int, device: torch.device) -> int:
    """f32 numbers a launch needs as scratch, beside the activation's output."""
    kernels = hopper if jit.capability(device.index or 0) == _HOPPER else ampere
    return kernels.partials_numel(max_rows, device)


def run_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    hidden: torch.Tensor,
    partials: torch.Tensor,
    ampere_only: bool = False,
) -> None:
    """Computes every expert's rows; all arguments checked by the caller, all on one GPU.

    Args:
        output: `[E, max_rows, K]`, or `[num_ids, K]` where rows are sorted.
        hidden_states: rows of K numbers; may be `output`.
        hidden: scratch for the activation's output, N numbers for each row.
        partials: f32 scratch, partials_numel.
        ampere_only: leave Hopper's own kernels out, so that tests can run on it what other GPUs would.

    Raises:
        BackendUnavailableError: the GPU is older than sm_80.
        ValueError: rows that do not begin at a multiple of 16 bytes.
    """
    for name, tensor in (("hidden_states", hidden_states), ("output", output)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} does not begin at a multiple of 16 bytes; pass a copy of it")
    if ampere_only or not pair.once(_hopper_serves):
        ampere.launch(output, hidden_states, pair, rows, hidden, partials)
        return
    hidden_states, rows = ampere.in_packed_order(output, hidden_states, pair.w13, rows)
    hopper.launch(experts_params(hidden_states, hidden, output, pair, rows), pair, partials)


def _hopper_serves(pair: WeightPair) -> bool:
    """Whether it is Hopper whose kernels compute this: groups in order and equally far apart, w2's columns as w13's
    rows, and no more experts than there is room for. BackendUnavailableError for GPUs that no kernels are for."""
    capability, w13, w2 = torch.cuda.get_device_capability(pair.device), pair.w13, pair.w2
    if capability < _OLDEST:
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(pair.device)} has compute capability {capability[0]}.{capability[1]}; packed "
            f"experts need 8.0 (A100) or newer, choose experts='reference' on this GPU"
        )
    if capability != _HOPPER or w2.sort_indices is not None or pair.num_experts > hopper.MOST_EXPERTS:
        return False
    return w13.has_regular_groups and w2.has_regular_groups and hopper.have_one_spacing(w13, w2)
