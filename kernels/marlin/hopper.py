"""Launches Hopper's kernels: both GEMMs of the experts, with the activation between them, in one.

The decode kernel computes experts of few rows (small-M), the prefill kernel those of more (large-M). The boundary is in
tuning.py; the device decides from the rows of all experts which kernel takes which (cuda/select_kernel.cuh), and the
decode kernel splits an expert of more rows into several tiles. If small-M is expected everywhere and the weights are
small, the decode kernel is launched alone: a second kernel costs 0.3 to 1.2 us even without work.

Scratch of a launch: flags that are never cleared, or zero before and after (no memset), and partial sums of tiles that
several blocks share: at most 2 x blocks x 256 x tokens of a tile floats, 35 MB on a GPU of 132 SMs for tiles of 128
tokens. The decode kernel keeps its own partial sums, 9 MB, among the flags.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.errors import ConfigError
from moe_ep.kernels import jit
from moe_ep.kernels.arrival import Arrival, ArrivalParams, PeerBatch, PeerBuild
from moe_ep.kernels.marlin import tuning
from moe_ep.kernels.marlin.params import CUDA, ExpertsParams, Rows, activation_defines, stream_flags, type_number
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.routing import DeferredTopK, RouterParams

_HOPPER = (9, 0)
_DECODE_THREADS, _PREFILL_THREADS = 640, 384
_TILE_ROWS = 256
_MAX_BLOCKS = 256
_MOST_FOR_ONE_WAVE = 128  # tiles: no more than Hopper's SMs
MOST_EXPERTS = 768  # kMaxExperts of cuda/params.cuh
# Mean rows of an expert up to which the decode kernel is launched alone, if up to 32 rows are small-M. With uniform
# routing it is faster up to 24; with a trained model's choices some shapes are slower at 20.
_MOST_EXPECTED = 16
# And only if the second kernel costs at least so much, in units of an expert's time for one step: 184 for Qwen3-30B, 46
# for Qwen3-235B, 33 for GPT-OSS-120B. With the large weights of DeepSeek-V3 (20), one kernel gains 1 % at most, and
# reading weights again for every 32 rows is expensive as soon as routing is uneven, so the device decides.
_MIN_LAUNCH_OVERHEAD = 30
_MOST_INVARIANT_TILES = 1536  # of tokens in a batch-invariant launch (kMostInvariantTiles of cuda/decode_sm90.cu)
_INVARIANT_TILE_TOKENS = 16  # kDecodeTileTokens of cuda/params.cuh there
# Tiles of tokens in the decode kernel's list: 512 cost tiles of 8 and 16 tokens a pipeline stage, and those of 32 none;
# 272, the limit if both kernels are launched, cost no stage.
_MOST_TILES, _MOST_TILES_OF_BOTH = 512, 272
_STEP_COLUMNS = 128
_TILE_TOKENS = (8, 16, 32, 64, 128)
_MIN_SPLIT_K = 4  # kMinSplitK of cuda/decode_sm90.cu
# kRoutedTokens of cuda/decode_sm90.cu, and slots that they have at most.
_ROUTED_TOKENS, _ROUTED_SLOTS = 16, 128
_FIXUP_SUMS = 2  # where the decode kernel's partial sums begin in its flags, in units of 64 bits
_PACKET_TOKENS = 8  # of tiles whose activations pass between blocks as flag-in-data packets
_READ_TOKENS = 64  # of a tile's sums that the prefill kernel reads at once, also beyond the last one
# The cost of a second kernel if both have rows: 25 us, in units of small_m_cost() of cuda/select_kernel.cuh times steps
# of a block.
_LAUNCH_OVERHEAD = 200


TENSOR_MAP_BYTES = 128
_BOX_ROWS, _BOX_BYTES = 32, 128  # kBoxTokens of the kernels' stages; what a row of swizzled tokens has
_BLOCK_BYTES = 64 * 32  # of packed 8-bit codes: a strip of 64 rows, 32 columns (repack.py)


class PrefillParams(ctypes.Structure):
    """PrefillParams of cuda/prefill_sm90.cu, as large as its alignment makes it."""

    _fields_ = (
        ("tokens", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
        ("experts", ExpertsParams),
        ("unused", ctypes.c_uint8 * (-ctypes.sizeof(ExpertsParams) % 64)),
    )


class ArrivingExperts(ExpertsParams):
    """ExpertsParams of cuda/params.cuh with ARRIVALS."""

    _fields_ = (("arrival", ArrivalParams),)


class RoutedExperts(ExpertsParams):
    """ExpertsParams of cuda/params.cuh with ROUTED."""

    _fields_ = (("router", RouterParams), ("results", ctypes.c_void_p))


@functools.cache
def peer_experts(batch: Any) -> type[ExpertsParams]:
    """ExpertsParams of cuda/params.cuh with PEERS, for batches of that structure."""
    return type("PeerExperts", (ExpertsParams,), {"_fields_": (("batch", batch), ("results", ctypes.c_void_p))})


class ArrivingParams(ctypes.Structure):
    """PrefillParams with ARRIVALS."""

    _fields_ = (
        ("tokens", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
        ("experts", ArrivingExperts),
        ("unused", ctypes.c_uint8 * (-ctypes.sizeof(ArrivingExperts) % 64)),
    )


def kernel_source(
    kind: WeightType,
    act_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    groups_per_step: int,
    activation: MoEActivation,
    decode: bool,
    tall: bool = False,
    clamp_limit: float | None = None,
    batch_invariant: bool = False,
    arrivals: bool = False,
) -> jit.KernelSource:
    """The decode or the prefill kernel for one number type, with scales every 128 / groups_per_step columns.

    Args:
        tall: see may_be_tall.
        clamp_limit: as in gate_limit.
        batch_invariant: the decode kernel whose results for a row depend on no other row.
        arrivals: the prefill kernel that runs while its rows arrive (launch_arriving).
    """
    defines = {
        "WEIGHT_TYPE": type_number(kind, scale_dtype),
        "ACT_BF16": int(act_dtype == torch.bfloat16),
        "SCALES_PER_STEP": groups_per_step,
        **activation_defines(activation, clamp_limit),
    }
    if batch_invariant:
        defines["BATCH_INVARIANT"] = 1
    if not decode:
        defines["TALL"] = int(tall and kind.bits == 4 and not kind.has_zero_points and act_dtype == torch.bfloat16)
    if arrivals:
        defines["ARRIVALS"] = 1
    name, entry = ("decode_sm90.cu", "decode") if decode else ("prefill_sm90.cu", "prefill")
    return jit.KernelSource(CUDA / name, entry, tuple((name, str(value)) for name, value in defines.items()))


def combining_defines(build: PeerBuild, num_experts: int) -> tuple[tuple[str, str], ...]:
    """What the decode kernel's build with PEERS has beside the plain one's constants."""
    experts = {"ROUTED": 1, "PEERS": 1, "NUM_EXPERTS": num_experts, "TOP_K": build.topk}
    return (
        *(each for each in build.defines if each[0] != "ACT_BF16"),
        *((name, str(value)) for name, value in experts.items()),
    )


def kernel_sources(
    kind: WeightType,
    act_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    group_size: int,
    activation: MoEActivation,
    sizes: tuple[int, int, int],
    clamp_limit: float | None = None,
    batch_invariant: bool = False,
) -> list[jit.KernelSource]:
    """The prefill and the decode kernel for `sizes` (experts, K and N), or the batch-invariant one."""
    num_experts, K, N = sizes
    per_step = groups_per_step(K, 1 if group_size == -1 else K // group_size)
    tall = may_be_tall(num_experts, ((1 + activation.is_gated) * N, K))
    numbers = (kind, act_dtype, scale_dtype, per_step, activation)
    if batch_invariant:
        return [kernel_source(*numbers, decode=True, clamp_limit=clamp_limit, batch_invariant=True)]
    return [kernel_source(*numbers, decode, tall, clamp_limit) for decode in (False, True)]


def may_be_tall(num_experts: int, rows: tuple[int, int]) -> bool:
    """Whether tiles of 384 or 512 of w13's or w2's weight rows may pay: those of 256 may be more than a GPU's SMs."""
    return num_experts * -(-max(rows) // _TILE_ROWS) > _MOST_FOR_ONE_WAVE


def runs_on(device: torch.device) -> bool:
    """Whether these kernels are for that GPU."""
    return device.type == "cuda" and jit.capability(device.index or 0) == _HOPPER


def groups_per_step(num_columns: int, num_groups: int) -> int:
    """Groups of scales that 128 columns span: 1 where a group is longer or the whole row."""
    return 1 if num_groups == 1 else max(1, _STEP_COLUMNS * num_groups // num_columns)


def have_one_spacing(columns: tuple[int, int], groups: tuple[int, int]) -> bool:
    """Whether the scales of w13 and w2, with these columns and groups of them, lie equally far apart, or one has a
    single group that one step covers."""
    spacings = list(map(groups_per_step, columns, groups))
    most = max(spacings)
    return all(spacing == most or size * most <= _STEP_COLUMNS for spacing, size in zip(spacings, columns, strict=True))


@functools.lru_cache(maxsize=1024)
def partials_numel(max_rows: int, device: torch.device) -> int:
    """f32 numbers a launch needs for shared tiles."""
    tokens = _tile_tokens(max_rows)
    return _TILE_ROWS * (2 * _num_blocks(device.index or 0) * tokens + max(_READ_TOKENS - tokens, 0))


def launch(params: ExpertsParams, pair: WeightPair, partials: torch.Tensor, rows: Rows) -> None:
    """Computes every expert's rows.

    Args:
        params: all but flags and partial sums.
        partials: f32 scratch, partials_numel.
        rows: as the parameters have them.
    """
    common = pair.once(_Common)
    params.partials = partials.data_ptr()
    params.max_tile_tokens = _tile_tokens(params.max_rows)
    if pair.batch_invariant:
        kernel = pair.once(_load, True, "batch_invariant")
        set_invariant_rows(params, rows)
        common.set_flags(params, f"{kernel.entry}_invariant", decode=True)
        common.launch_decode(kernel, params)
        return
    for decode in select_kernels(params, common, rows):
        kernel = common.kernels[decode]
        common.set_flags(params, kernel.entry, decode)
        if decode:
            common.launch_decode(kernel, params)
        else:
            given = _prefill_params(params, pair.act_dtype)
            kernel.launch(given, (common.num_blocks, 1, 1), _PREFILL_THREADS, common.shared_bytes, early=True)


def launch_arriving(
    params: ExpertsParams, pair: WeightPair, partials: torch.Tensor, rows: Rows, arrival: Arrival
) -> None:
    """Has the rows sent, and computes every expert's while they arrive. Rows must be sorted.

    One kernel computes all experts: a second one would wait for the end of those before it.
    """
    common, kernel = pair.once(_Common), pair.once(_load, False, "arrivals")
    params.partials = partials.data_ptr()
    params.max_tile_tokens = _tile_tokens(params.max_rows)
    params.max_small_m, params.launch_overhead, params.max_tiles = 0, 0, params.num_experts
    common.set_flags(params, f"{kernel.entry}_arriving", decode=False)
    plain = _prefill_params(params, pair.act_dtype)
    given = ArrivingParams(tokens=plain.tokens, experts=ArrivingExperts.of(params, arrival=arrival.params))
    blocks = min(common.num_blocks, arrival.most_blocks or common.num_blocks)
    arrival.start()
    kernel.launch(given, (blocks, 1, 1), _PREFILL_THREADS, common.shared_bytes, early=True)


def most_routed_tokens(top_k: int) -> int:
    """Tokens that `launch_routed` has room for."""
    return min(_ROUTED_TOKENS, _ROUTED_SLOTS // top_k)


def launch_routed(params: ExpertsParams, pair: WeightPair, deferred: DeferredTopK) -> bool:
    """Routes tokens, computes their experts and sums the slots in one kernel, with the bits of separate ones.

    Returns False, with nothing done, for more tokens than it has room for, where w2 may have so few tiles that all
    blocks share each (split-K), and where the kernel would have to be loaded while a CUDA graph is captured.

    Args:
        params: all but rows, flags and partial sums; w2's output is `[T, K]`.
    """
    common = pair.once(_Common)
    kernel = common.routed_kernel(deferred)
    least_tiles = deferred.top_k * -(-pair.w2.num_rows // _TILE_ROWS)
    has_room = deferred.num_tokens <= most_routed_tokens(deferred.top_k)
    if kernel is None or not has_room or common.num_blocks // least_tiles >= _MIN_SPLIT_K:
        return False
    results = _set_routed(params, common, deferred.num_tokens, _ROUTED_SLOTS, kernel.entry)
    common.launch_decode(kernel, RoutedExperts.of(params, router=deferred.take(), results=results))
    return True


def has_peers_kernel(pair: WeightPair, build: PeerBuild) -> bool:
    """Whether launch_peers has no kernel left to load."""
    return build in pair.once(_Common).routed


def launch_peers(params: ExpertsParams, pair: WeightPair, peers: PeerBatch) -> None:
    """Computes the rows of all ranks that lie in packets and returns the sums, with the bits of separate kernels.

    Args:
        params: all but rows, flags and partial sums.
        peers: with its output set.
    """
    common = pair.once(_Common)
    kernel = common.peers_kernel(peers.build)
    num_slots = peers.num_rows * peers.build.topk
    params.gemm[0].input = peers.rows
    more = num_slots * pair.w2.num_rows
    results = _set_routed(params, common, peers.num_rows, num_slots, f"{kernel.entry}_peers", more)
    batch: Any = type(peers.params)
    given = peer_experts(batch).of(params, batch=peers.params, results=results)
    with peers.launching:
        common.launch_decode(kernel, given)


def _set_routed(
    params: ExpertsParams, common: _Common, num_rows: int, most_slots: int, flags: str, more: int = 0
) -> int:
    """Sets all for a kernel that chooses or reads the experts of its rows; returns where the slots' results lie."""
    num_experts = common.problem.experts
    params.num_experts, params.max_rows, params.sorted = num_experts, num_rows, 1
    params.max_small_m, params.max_tiles = tuning.MOST_SMALL_M, min(num_experts, most_slots)
    common.set_flags(params, flags, decode=True, more=more)
    return params.hidden_packets + 8 * common.num_hidden_packets


def most_invariant_rows(num_experts: int) -> int:
    """Rows of all experts together that one batch-invariant launch has room for."""
    return (_MOST_INVARIANT_TILES - num_experts) * _INVARIANT_TILE_TOKENS


def set_invariant_rows(params: ExpertsParams, rows: Rows) -> None:
    """Says in the parameters that one kernel computes all experts.

    Raises:
        ConfigError: it has no room for so many rows.
    """
    num_experts = params.num_experts
    most = num_experts * rows.max_rows if rows.most_rows is None else rows.most_rows
    if most > most_invariant_rows(num_experts):
        raise ConfigError(
            f"batch_invariant is set and {num_experts} packed experts may get {most} rows in one pass, above "
            f"{most_invariant_rows(num_experts)}; lower max_num_tokens, or choose all2all_backend='all_to_all'"
        )
    params.max_small_m, params.launch_overhead = max(params.max_rows, 1), 0
    params.max_tiles = num_experts + -(-most // _INVARIANT_TILE_TOKENS)


def _load(pair: WeightPair, decode: bool, option: str) -> jit.Kernel:
    """A build that only some layers need, with that option of kernel_source."""
    common = pair.once(_Common)
    return common.load(common.source(decode=decode, **{option: True}))


def select_kernels(params: ExpertsParams, common: _Common, rows: Rows) -> tuple[bool, ...]:
    """Sets in the parameters which kernel computes which experts; returns the kernels to launch, True for decode."""
    params.max_small_m, params.launch_overhead, params.max_tiles = tuning.MOST_SMALL_M, 0, params.num_experts
    if params.max_rows <= tuning.MOST_SMALL_M:
        return (True,)
    max_small_m, is_forced = tuning.max_small_m(common.device_name, common.problem), tuning.is_forced()
    most_expected = _MOST_EXPECTED * max_small_m / tuning.MOST_SMALL_M
    expects_small_m = rows.expected_m is not None and rows.expected_m <= most_expected and not is_forced
    most_tiles = _most_tiles(params.num_experts, rows)
    if expects_small_m and most_tiles <= _MOST_TILES and common.launch_overhead >= _MIN_LAUNCH_OVERHEAD:
        params.max_small_m, params.max_tiles = params.max_rows, most_tiles
        return (True,)
    params.max_tiles = max(params.num_experts, min(most_tiles, _MOST_TILES_OF_BOTH))
    params.max_small_m, params.launch_overhead = max_small_m, 0 if is_forced else common.launch_overhead
    return True, False


def _most_tiles(num_experts: int, rows: Rows) -> int:
    """How many tiles of up to 32 tokens all experts may have together."""
    most_tiles = num_experts * -(-rows.max_rows // tuning.MOST_SMALL_M)
    if rows.most_rows is None:
        return most_tiles
    return min(most_tiles, num_experts + rows.most_rows // tuning.MOST_SMALL_M)


class _Common:
    """What all launches for the same weights have in common.

    Attributes:
        routed: the decode kernels that choose or read the experts of their rows, by what they are compiled with.
        launch_overhead: the cost of a second kernel, in units of an expert's time for one step of a tile.
        num_flags: int32 numbers of `sync`, True for the decode kernel's.
        hidden_packets: where results begin in `sync` of the decode kernel, in units of 64 bits.
    """

    def __init__(self, pair: WeightPair) -> None:
        w13, w2 = pair.w13, pair.w2
        self.device, index = pair.device, pair.device.index or 0
        self.device_name = torch.cuda.get_device_name(index)
        self.problem = tuning.problem_of(w13, w2, pair.kind)
        self.num_blocks, self.shared_bytes = _num_blocks(index), _max_shared_bytes(index)
        steps = sum(-(-w.num_rows // _TILE_ROWS) * -(-w.num_columns // _STEP_COLUMNS) for w in (w13, w2))
        self.launch_overhead = -(-_LAUNCH_OVERHEAD * self.num_blocks // steps)
        per_step = max(groups_per_step(w.num_columns, w.scales.size(1)) for w in (w13, w2))
        numbers = (pair.kind, pair.act_dtype, w13.scales.dtype, per_step, pair.activation)
        tall = may_be_tall(pair.num_experts, (w13.num_rows, w2.num_rows))
        self.source = functools.partial(kernel_source, *numbers, tall=tall, clamp_limit=pair.clamp_limit)
        self._sources = {decode: self.source(decode=decode) for decode in (True, False)}
        # The decode kernel's flags, in units of 64 bits: the ticket counter, partial sums (cuda/decode_sm90.cu; at one
        # place for all weights, since they are zero between launches), a flag for each tile of any launch, so that a
        # larger one under capture needs no others, and `hidden` as packets.
        row_tiles = -(-w13.num_rows // _TILE_ROWS)
        flags = _FIXUP_SUMS + self.num_blocks * tuning.MOST_SMALL_M * _TILE_ROWS
        most_tiles = _MOST_INVARIANT_TILES if pair.batch_invariant else max(_MOST_TILES, pair.num_experts)
        self.hidden_packets = (flags + most_tiles * row_tiles + 1) // 2 * 2
        hidden = pair.num_experts * -(-w2.num_columns // _STEP_COLUMNS) * _PACKET_TOKENS * _STEP_COLUMNS // 2
        prefill_flags = 2 + 2 * _MAX_BLOCKS + pair.num_experts * max(row_tiles, 2)
        self.num_hidden_packets = hidden
        results = _ROUTED_SLOTS * w2.num_rows // 2
        self.num_flags = {True: 2 * (self.hidden_packets + hidden + results), False: prefill_flags}
        self.routed: dict[Any, jit.Kernel] = {}

    def peers_kernel(self, build: PeerBuild) -> jit.Kernel:
        """The decode kernel that combines such batches."""
        kernel = self.routed.get(build)
        if kernel is None:
            source = self._sources[True]
            defines = (*source.defines, *combining_defines(build, self.problem.experts))
            kernel = self.routed[build] = self.load(replace(source, defines=defines, folders=(build.folder,)))
        return kernel

    def routed_kernel(self, deferred: DeferredTopK) -> jit.Kernel | None:
        """The decode kernel that makes such a choice itself; None before the first pass that is not captured."""
        kernel = self.routed.get(deferred.defines)
        if kernel is None and not torch.cuda.is_current_stream_capturing():
            source = self._sources[True]
            source = replace(source, defines=(*source.defines, *deferred.defines, ("ROUTED", "1")))
            # Together with those for more tokens, which may be captured next.
            kernel = jit.load_all({"routed": source, **self._sources}, self.device)["routed"]
            kernel.allow_shared(self.shared_bytes)
            self.routed[deferred.defines] = kernel
        return kernel

    def load(self, source: jit.KernelSource) -> jit.Kernel:
        kernel = jit.load(source, self.device)
        kernel.allow_shared(self.shared_bytes)
        return kernel

    def launch_decode(self, kernel: jit.Kernel, params: ExpertsParams) -> None:
        kernel.launch(params, (self.num_blocks, 1, 1), _DECODE_THREADS, self.shared_bytes, early=True)

    def set_flags(self, params: ExpertsParams, name: str, decode: bool, more: int = 0) -> None:
        """Flags of that name, of the current stream, with room for `more`."""
        params.sync = stream_flags(self.device, name, self.num_flags[decode] + more).data_ptr()
        params.fixup_sums = params.sync + 8 * _FIXUP_SUMS
        params.hidden_packets = params.sync + 8 * self.hidden_packets

    @functools.cached_property
    def kernels(self) -> dict[bool, jit.Kernel]:
        """The decode (True) and the prefill kernel, loaded together, whichever the first launch needs."""
        kernels = jit.load_all(self._sources, self.device)
        for kernel in kernels.values():
            kernel.allow_shared(self.shared_bytes)
        return kernels


def _prefill_params(params: ExpertsParams, act_dtype: torch.dtype) -> PrefillParams:
    """The parameters with the maps of w13's input, unless its rows are gathered, and of w2's."""
    prefill = PrefillParams(experts=params)
    num_rows = params.max_rows if params.sorted else params.num_experts * params.max_rows
    for phase, gemm in enumerate(params.gemm):
        if phase == 1 or params.row_ids is None:
            encoded = tensor_map(gemm.input, num_rows, gemm.columns, act_dtype)
            ctypes.memmove(prefill.tokens[phase], encoded, TENSOR_MAP_BYTES)
    return prefill


@functools.lru_cache(maxsize=1024)
def _tile_tokens(max_rows: int) -> int:
    """Tokens of the largest tile that experts of up to max_rows rows need."""
    return next((tokens for tokens in _TILE_TOKENS if tokens >= max_rows), _TILE_TOKENS[-1])


@functools.cache
def _num_blocks(device_index: int) -> int:
    return min(torch.cuda.get_device_properties(device_index).multi_processor_count, _MAX_BLOCKS)


@functools.cache
def _max_shared_bytes(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def tensor_map(address: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> bytes:
    """The map of a contiguous matrix for tensor copies in boxes of 32 rows x 128 bytes, swizzle 128, zeros out of
    bounds.

    It depends only on address and shape, and encoding takes microseconds, so maps are cached. The format of the 128
    bytes is internal to the driver (CUDA driver API, cuTensorMapEncodeTiled).

    Args:
        dtype: bfloat16, float16, or uint8 for the codes of 8-bit numbers.

    Raises:
        ImportError: cuda-core is missing.
        RuntimeError: the driver refuses the matrix.
    """
    formats = jit.driver_bindings().CUtensorMapDataType
    of_dtype = {
        torch.bfloat16: formats.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: formats.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.uint8: formats.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    box = (_BOX_BYTES // dtype.itemsize, _BOX_ROWS)
    sizes, strides = (num_columns, num_rows), (num_columns * dtype.itemsize,)
    return _encode_map(address, of_dtype[dtype], sizes, strides, box, swizzled=True)


@functools.lru_cache(maxsize=1024)
def codes_map(address: int, num_rows: int, num_columns: int) -> bytes:
    """The map of packed 8-bit codes (repack.py) for tensor copies of 128 rows x 128 columns, zeros out of bounds.

    A strip of 64 rows has blocks of 32 columns one after the other; a copy has the same block of two strips side by
    side. Cached, and with the errors, as tensor_map.
    """
    words = _BLOCK_BYTES // 8
    sizes, strides = (words, num_rows // 64, num_columns // 32), (64 * num_columns, _BLOCK_BYTES)
    number_type = jit.driver_bindings().CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT64
    return _encode_map(address, number_type, sizes, strides, (words, 2, 4), swizzled=False)


def _encode_map(
    address: int,
    number_type: Any,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
) -> bytes:
    """A tensor map; sizes and box in numbers, the innermost dimension first, strides of the others in bytes."""
    driver = jit.driver_bindings()
    swizzles = driver.CUtensorMapSwizzle
    result = driver.cuTensorMapEncodeTiled(
        number_type,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(jit.checked(result).getPtr(), TENSOR_MAP_BYTES)
