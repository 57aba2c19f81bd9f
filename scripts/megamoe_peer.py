"""DeepGEMM's MegaMoE for Hopper as a peer of bench_ep_scaling.py: dispatch, e4m3 experts and combine in its kernels.

sgl-deep-gemm 0.1.4 loads with torch 2.11 (it needs apache-tvm-ffi 0.1.11). Other versions do not load or fail in their
first call; the error says which. Rows are quantized beforehand, as its users do, and copied in, and there is no router.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from peer_package import PeerPackage, PeerUnavailableError, first_line

from moe_ep.bench.geometries import Geometry, preset
from moe_ep.bench.timing import slowest_rank, time_calls, timing_of
from moe_ep.bench.workload import draw_logits, parse_routing
from moe_ep.launch.cli.scaling_config import ScalingConfig
from moe_ep.launch.gangs.rank_env import RankEnv

PACKAGE = PeerPackage(
    module="deep_gemm", name="sgl-deep-gemm", known_good="0.1.4", beside=("apache-tvm-ffi==0.1.11",),
    needs=("get_symm_buffer_for_sm90_mega_moe", "transform_weights_for_mega_moe_sm90", "fp8_mega_moe"),
)  # fmt: skip
_BLOCK = 128


class MegaMoE:
    """A layer of random e4m3 weights.

    Args:
        num_experts: over all ranks; each has the same number.
        K, N: hidden and intermediate size.
        capacity: most tokens of a rank.

    Raises:
        PeerUnavailableError: as `PeerPackage.load`, or sizes that its scales of 128 x 128 do not fit.
    """

    def __init__(self, num_experts: int, K: int, N: int, topk: int, capacity: int) -> None:
        self._module = PACKAGE.load()
        if K % _BLOCK or N % _BLOCK:
            raise PeerUnavailableError(f"K is {K} and N {N}; MegaMoE's scales need multiples of {_BLOCK}")
        group = dist.group.WORLD
        if group is None:
            raise PeerUnavailableError("one worker has no process group, which MegaMoE needs; pass --ep-size 2 or more")
        local = num_experts // group.size()
        self._buffer = self._module.get_symm_buffer_for_sm90_mega_moe(group, num_experts, capacity, topk, K, N)
        first, second = _weights(local, 2 * N, K), _weights(local, K, N)
        self._first, self._second = self._module.transform_weights_for_mega_moe_sm90(first, second)
        takes = inspect.signature(self._module.fp8_mega_moe).parameters
        self._more = {"recipe": (_BLOCK, _BLOCK, _BLOCK)} if "recipe" in takes else {}

    def prepare(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """Quantizes rows and copies the batch in; a call computes the layer.

        Args:
            x: `[T, K]`; weights: f32 `[T, topk]`; ids: `[T, topk]`, global.
        """
        num_tokens, buffer = len(x), self._buffer
        groups = x.float().view(num_tokens, -1, _BLOCK)
        scales = groups.abs().amax(dim=2).clamp(min=1e-4) / torch.finfo(torch.float8_e4m3fn).max
        codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(num_tokens, -1)
        output = torch.empty_like(x)

        def call(_: int) -> torch.Tensor:
            for target, source in (
                (buffer.x, codes),
                (buffer.x_sf, scales),
                (buffer.topk_idx, ids),
                (buffer.topk_weights, weights),
            ):
                target[:num_tokens].copy_(source)
            self._module.fp8_mega_moe(output, self._first, self._second, buffer, **self._more)
            return output

        try:
            call(0)
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, AttributeError) as error:
            raise PeerUnavailableError(
                f"{PACKAGE.name} {PACKAGE.version()} loads and fails in its first call ({first_line(error)}); "
                f"{PACKAGE.known_good} did not"
            ) from error
        return call


def _weights(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and the scales of their blocks."""
    codes = torch.randn((experts, rows, columns), dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
    return codes, torch.full((experts, rows // _BLOCK, columns // _BLOCK), 0.02, device="cuda")


def measure(rank_env: RankEnv, config: ScalingConfig) -> list[str]:
    """One worker's part: a line of a table for every geometry and number of tokens, or a sentence that says why not."""
    device = torch.device(rank_env.device)
    if device.type != "cuda":
        return [f"MegaMoE is for GPUs, and the workers run on {device.type}"]
    lines = [f"| MegaMoE, {PACKAGE.name} {PACKAGE.version()}: geometry | tokens per rank | us |", "|---|---|---|"]
    for geometry in map(preset, config.geometry or ("deepseek-v3",)):
        try:
            lines += [
                f"| {geometry.name} | {tokens} | {_time_us(geometry, tokens, config, rank_env):.1f} |"
                for tokens in (*config.decode_tokens, *config.prefill_tokens)
            ]
        except PeerUnavailableError as error:
            lines.append(f"{geometry.name}: {error}")
    return lines


def _time_us(geometry: Geometry, tokens: int, config: ScalingConfig, rank_env: RankEnv) -> float:
    """The median of the slowest rank, in a CUDA graph."""
    layer = MegaMoE(
        geometry.num_experts, geometry.hidden_size, geometry.intermediate_size, geometry.top_k, max(tokens, 1)
    )
    logits = draw_logits(
        parse_routing(config.routing[0]), tokens, geometry.num_experts, geometry.top_k,
        seed=config.seed * 1_000_003 * rank_env.world_size + rank_env.rank, popularity_seed=config.seed, device="cuda",
    )  # fmt: skip
    weights, ids = logits.softmax(dim=1).topk(geometry.top_k, dim=1)
    rows = torch.randn((tokens, geometry.hidden_size), dtype=torch.bfloat16, device="cuda")
    call = layer.prepare(rows, weights, ids)
    times = time_calls(
        call, device=torch.device("cuda"), chain=4, repeats=max(5, config.repeats), limit_s=config.repeat_seconds,
        together=dist.barrier,
    )  # fmt: skip
    return timing_of(slowest_rank(times)).median
