"""What scripts/reproduce.py runs: every test that needs GPUs and every measurement of docs/benchmarks, as one table.

Commands are those of the pages. In braces: {python}, {torchrun} and {moe_ep} start a process, or one a GPU; {pytest}
runs tests one by one, {pytests} some side by side; {gpus} is how many GPUs the part has; {rows} is the file of its
rows, and what prints JSON lines need not name it; {left} is how many seconds it may take; {commit} is the option
--commit; {model}, {texts}, {prompts}, {routing} are files of the caller, without which the part cannot run; {peers}
and {recorded} hold those that are there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_OF_ONE = '{pytest} -m "gpu and not gpu2 and not gpu8"'
_MANY_OF_ONE = '{pytests} -m "gpu and not gpu2 and not gpu8"'
_OF_TWO = "{pytest} -m gpu2"
_SCALING = "{torchrun} scripts/bench_ep_scaling.py"
_DISPATCH = "{python} scripts/bench_dispatch.py --ranks {gpus} {commit} --json {rows}"
_NVSHMEM = "nvshmem_low_latency:by_reference,nvshmem_low_latency,nvshmem_high_throughput"
_SIZES = "--wires bf16 --hidden 2048,2880,4096,5120 --topk 4,6"
_MODELS = ("deepseek-v3", "kimi-k2", "qwen3-235b", "qwen3-30b", "mixtral-8x7b", "gpt-oss-120b")
_LOADING = "{python} scripts/bench_loading.py --device cuda {commit} --json {rows}"
_INT4 = "--format int4 --geometry deepseek-v3 --made-layers 1 --made-experts 128 --ep-size 4"
_PLANNING = "{python} scripts/bench_eplb.py"
_PEER_COPIES = "--steps 200 --tokens 128,64 --transports peer_copies --gb-s 40"
_MOVING = f"{{python}} scripts/bench_eplb_moving.py --ranks {{gpus}} {_PEER_COPIES}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing to run, with a log and rows of its own.

    Attributes:
        page: of docs/benchmarks, which it feeds.
        seconds: about what it takes on H200s, with kernels that are not compiled yet.
        gpus: how many it takes; at least so many, if `widens`.
        widens: takes all GPUs that there are.
        shares: its GPUs with another part that does: it times nothing.
        needs: modules and programs that must be there.
        headline: lines of its log that match this expression tell what came out.
    """

    name: str
    page: str
    seconds: float
    commands: tuple[str, ...]
    gpus: int = 1
    widens: bool = False
    shares: bool = False
    needs: tuple[str, ...] = ()
    headline: str | None = None


def _one(name: str, page: str, seconds: float, *commands: str, needs: str = "", headline: str | None = None) -> Part:
    """Of one GPU."""
    return Part(name=name, page=page, seconds=seconds, commands=commands, needs=tuple(needs.split()), headline=headline)


def _every(name: str, page: str, seconds: float, *commands: str, needs: str = "", headline: str | None = None) -> Part:
    """Of two GPUs, or more where there are more."""
    return replace(_one(name, page, seconds, *commands, needs=needs, headline=headline), gpus=2, widens=True)


def _tests(name: str, gpus: int, seconds: float, pytest: str, files: str) -> Part:
    page = "dispatch.md" if "nvshmem" in name else "runtime.md"
    return replace(_one(name, page, seconds, f"{pytest} {files}", needs="pytest"), gpus=gpus, shares=True)


_NVSHMEM_TESTS = "tests/gpu/test_nvshmem_gpu.py tests/gpu/test_nvshmem_prefill_gpu.py"
_DISPATCH_TESTS = "tests/gpu/test_dispatch_gpu.py tests/gpu/test_eplb_moving_gpu.py"
_RUN_TESTS = "tests/gpu/test_run_gpu.py tests/gpu/test_transformers_gpu.py tests/launch/test_run.py"
_OTHER_TESTS = f"{_DISPATCH_TESTS} {_RUN_TESTS}"
_TESTS = (
    # Of one GPU. Those of the packed experts mostly compile, and would in each of several processes.
    _tests("tests-marlin", 1, 200, _OF_ONE, "tests/gpu/test_marlin_gpu.py tests/gpu/test_routed_gpu.py"),
    _tests(
        "tests-prefill", 1, 220, _OF_ONE,
        "tests/gpu/test_marlin_prefill_gpu.py tests/gpu/test_marlin_act_order_gpu.py "
        "tests/gpu/test_marlin_eight_bit_gpu.py",
    ),
    _tests(
        "tests-kernels", 1, 90, _MANY_OF_ONE,
        "tests/kernels/test_align.py tests/kernels/test_grouped.py tests/kernels/test_marlin_repack.py "
        "tests/kernels/test_mul_sum.py tests/kernels/test_rotary.py tests/kernels/test_routing_triton.py "
        "tests/kernels/test_tuning.py tests/modular_kernel/test_workspace.py tests/checkpoint/test_formats.py "
        "tests/hf/test_choices.py tests/eplb/test_batch_plan.py "
        "tests/gpu/test_eplb_gpu.py tests/gpu/test_formats_gpu.py tests/gpu/test_grouped_gpu.py "
        "tests/gpu/test_triton_kernel_gpu.py tests/gpu/test_replay_gpu.py tests/gpu/test_rollouts_gpu.py "
        "tests/gpu/test_batch_invariance_gpu.py",
    ),
    _tests(
        "tests-nvshmem", 1, 330, _OF_ONE,
        # Those of many ranks in one process, those that start gangs, and those that take much of a GPU's memory.
        f"tests/gpu/test_nvshmem_ranks_gpu.py tests/gpu/test_nvshmem_ranks_faults_gpu.py "
        f"tests/gpu/test_nvshmem_late_gpu.py tests/gpu/test_nvshmem_grid_gpu.py tests/gpu/test_overlap_gpu.py "
        f"tests/gpu/test_batch_exchange_gpu.py "
        f"tests/gpu/test_nvshmem_numbers_gpu.py {_NVSHMEM_TESTS} "
        f"tests/gpu/test_layer_gpu.py {_OTHER_TESTS} tests/gpu/test_marlin_large_gpu.py "
        "tests/gpu/test_f16_range_gpu.py tests/gpu/test_elastic_gpu.py",
    ),
    # Of several ranks. Those of more ranks than the part has GPUs are skipped by the tests themselves.
    _tests(
        "tests-2-nvshmem", 2, 85, _OF_TWO,
        f"{_NVSHMEM_TESTS} tests/gpu/test_nvshmem_faults_gpu.py tests/gpu/test_overlap_gpu.py",
    ),
    _tests("tests-2-layer", 2, 75, _OF_TWO, "tests/gpu/test_layer_gpu.py tests/gpu/test_batch_balance_gpu.py"),
    _tests("tests-2-dispatch", 2, 85, _OF_TWO, _DISPATCH_TESTS),
    _tests(
        "tests-2-runs", 2, 95, _OF_TWO,
        f"{_RUN_TESTS} tests/gpu/test_replay_ranks_gpu.py tests/gpu/test_batch_invariance_gpu.py "
        "tests/gpu/test_elastic_gpu.py",
    ),
    _tests(
        "tests-4-nvshmem", 4, 135, f'{_OF_TWO} -k "[3 or [4 or two_level"',
        f"{_NVSHMEM_TESTS} tests/gpu/test_two_level_gpu.py",
    ),
    _tests("tests-4-others", 4, 165, f'{_OF_TWO} -k "[4"', f"tests/gpu/test_layer_gpu.py {_OTHER_TESTS}"),
    # Two and eight processes on one GPU: everything but NCCL and how long it takes.
    _tests(
        "tests-8-shared", 1, 240, 'MOE_EP_TEST_SHARED_GPUS=1 {pytest} -m gpu8 -k "nvshmem and not grid"',
        f"{_NVSHMEM_TESTS} tests/gpu/test_layer_gpu.py",
    ),
    _tests(
        "tests-moving-shared", 1, 120,
        'MOE_EP_TEST_SHARED_GPUS=1 {pytest} -m "gpu2 or gpu8" -k "replay or 8 and nvshmem and peer_copies"',
        "tests/gpu/test_replay_ranks_gpu.py tests/gpu/test_eplb_moving_gpu.py",
    ),
    _tests("tests-8", 8, 240, "{pytest} -m gpu8", f"{_NVSHMEM_TESTS} tests/gpu/test_layer_gpu.py {_OTHER_TESTS}"),
)  # fmt: skip

# In order of worth: what does not fit the time is left out from the end.
PARTS = (
    *_TESTS,
    # The layer, and what it is made of.
    _every(
        "scaling", "scaling.md", 130,
        f"{_SCALING} --geometry deepseek-v3,deepseek-v4-flash,qwen3-235b,qwen3-30b,gpt-oss-120b,mixtral-8x7b,kimi-k2 "
        "--scaling weak,strong --routing uniform,zipf:0.5{recorded} --eplb off,on --variant-tokens 128 "
        "--repeats 20 --repeat-seconds 0.1 {commit} --seconds {left} --json {rows}",
    ),
    _every(
        "dispatch", "dispatch.md", 60,
        f"{_DISPATCH} --repeats 12 --num-sms 16,24,48 "
        f"--backends {_NVSHMEM},all_to_all,batched_all_to_all,allgather_reducescatter",
    ),
    _one(
        "gemm", "experts.md", 230,
        *(f"{{moe_ep}} tune --geometry {name} --ep-size 8" for name in _MODELS),
        "{python} scripts/bench_gemm.py --peers {peers} --peer-seconds 200 {commit} --jsonl {rows}",
        "{python} scripts/gemm_tables.py {rows}",
        headline="x in the geometric mean|reach their target",
    ),
    _every(
        "soak", "dispatch.md", 50,
        "{torchrun} scripts/soak_nvshmem.py --hidden 2048 --delay-us 5 --pairs 1000000 --seconds {left}",
        headline="rows compared",
    ),
    _every(
        "soak-layers", "scaling.md", 110,
        "{torchrun} scripts/soak_overlap.py --steps 10000 --seconds 45 {commit} --json {rows}",
        "{torchrun} scripts/soak_decode.py --seconds {left} {commit} --json {rows}",
        headline="rows compared",
    ),
    replace(
        _one(
            "sanitizers", "dispatch.md", 120, "sh scripts/sanitize.sh",
            needs="pytest compute-sanitizer", headline="^(memcheck|racecheck) ",
        ),
        shares=True,
    ),
    _every(
        "eplb-moving", "balancing.md", 45,
        f"{_MOVING} --parts moving,bare,stall,transfer {{commit}} --json {{rows}}",
        f"{_MOVING} --parts skew {{commit}} --json {{rows}}",
    ),
    _every(
        "eplb-run", "balancing.md", 25,
        "{moe_ep} run --eplb --routing zipf:0.8 --launcher local --ep-size {gpus} --json {rows}",
        headline="^  (before|moving|after) |^verified",
    ),
    _every(
        "generate", "transformers.md", 50,
        "{python} scripts/bench_generate.py --launcher local --ep-size {gpus} --tokens 32,8,128 --steps 30 {commit} "
        "--json {rows}",
        needs="transformers",
    ),
    _every(
        "perplexity", "transformers.md", 25,
        "{python} scripts/perplexity.py --model {model} --texts {texts} --launcher local --ep-size {gpus}",
        needs="transformers", headline="perplexity",
    ),
    _every(
        "generate-text", "transformers.md", 25,
        "{moe_ep} generate --model {model} --prompts {prompts} --launcher local --ep-size {gpus} --batch-size 4 "
        "--max-new-tokens 64 --output {rows}",
        needs="transformers",
    ),
    _one(
        "transformers", "transformers.md", 220,
        "{python} scripts/bench_transformers.py blocks {commit} --json {rows}",
        "{python} scripts/bench_transformers.py generate {commit} --json {rows}",
        "{python} scripts/bench_transformers.py generate --layers 4 --compiled {commit} --json {rows}",
        needs="transformers",
    ),
    _every(
        "transformers-ranks", "transformers.md", 120,
        "{torchrun} scripts/bench_transformers.py generate --layers 12 {commit} --json {rows}",
        "{torchrun} scripts/bench_transformers.py generate --layers 4 --compiled {commit} --json {rows}",
        needs="transformers",
    ),
    _one(
        "slots", "transformers.md", 40, "{python} scripts/bench_slots.py {commit} --json {rows}", needs="transformers",
    ),
    _one(
        "index-kernels", "experts.md", 12,
        "{python} scripts/bench_index_kernels.py --markdown {commit} --json {rows}",
    ),
    _one("plain-experts", "experts.md", 40, "{python} scripts/bench_plain_experts.py {commit} --json {rows}"),
    _one("plain-tiles", "experts.md", 60, "{python} scripts/bench_plain_tiles.py {commit} --json {rows}"),
    _one(
        "gemm-types", "experts.md", 70,
        "{python} scripts/bench_gemm.py --shapes deepseek-v3 qwen3-30b --no-skew --rows 1 8 16 32 64 128 256 1024 "
        "--weights int4 int4-g32 uint4 int8 fp8 mxfp4 nvfp4 {commit} --jsonl {rows}",
        "{python} scripts/gemm_tables.py {rows}",
    ),
    _one("eight-bit-rows", "experts.md", 35, "{python} scripts/bench_eight_bit_rows.py {commit} --json {rows}"),
    _one("repack", "experts.md", 8, "{python} scripts/bench_repack.py {commit} --json {rows}"),
    _one("eplb-map", "balancing.md", 9, f"{_PLANNING} map {{commit}} --json {{rows}}"),
    _one(
        "replica-rules", "balancing.md", 75,
        "{python} scripts/bench_replica_rules.py {routing} {commit} --json {rows}",
    ),
    _one(
        "batch-invariance", "runtime.md", 60,
        "{python} scripts/bench_batch_invariance.py --device cuda --geometry qwen3-30b {commit} --json {rows}",
    ),
    _one("rollouts", "rollouts.md", 60, "{python} scripts/bench_rollouts.py --device cuda {commit} --json {rows}"),
    _every(
        "host", "runtime.md", 30,
        "{python} scripts/bench_host.py --launcher local --ep-size {gpus} {commit} --json {rows}",
    ),
    _every(
        "observability", "runtime.md", 50,
        "{torchrun} scripts/bench_observability.py --tokens 1,128 --chain 4 {commit} --json {rows}",
        needs="prometheus_client",
    ),
    _one(
        "loading", "runtime.md", 60,
        *(f"{_LOADING} --made-layers 4 --cache {cache}" for cache in ("cold", "warm")),
        *(f"{_LOADING} {_INT4} --repeats 3 --cache {cache}" for cache in ("cold", "warm")),
        headline="^plain read|^repacking",
    ),
    _every(
        "run", "runtime.md", 40,
        "{torchrun} -m moe_ep.launch run --model {model} --text {texts} --tokens-per-rank 128 --steps 10 "
        "--json {rows}",
    ),
    _every(
        "scaling-ray", "scaling.md", 50,
        "{moe_ep} bench scaling --launcher ray --ep-size {gpus} --geometry deepseek-v3 --repeats 20 "
        "--repeat-seconds 0.1 {commit} --seconds {left} --json {rows}",
        needs="ray",
    ),
    _every(
        "scaling-backends", "scaling.md", 50,
        f"{_SCALING} --geometry deepseek-v3 --ep-sizes {{gpus}} --decode-tokens 128 --prefill-tokens 1024 "
        "--wire activations,fp8 --repeats 20 --repeat-seconds 0.1 "
        "--backend nvshmem_low_latency,nvshmem_high_throughput,all_to_all,batched_all_to_all,allgather_reducescatter "
        "{commit} --seconds {left} --json {rows}",
    ),
    _every(
        "overlap", "scaling.md", 120,
        "{torchrun} scripts/bench_overlap.py {commit} --json {rows}",
        "{torchrun} scripts/bench_prefill.py {commit} --json {rows}",
        headline=r"^\|",
    ),
    _every(
        "prefill", "scaling.md", 150,
        "{torchrun} scripts/bench_prefill.py --parts overlap,balance --tokens 4096,1024 --layers deepseek-v3:int4,"
        "deepseek-v3:int4:int8,deepseek-v3:fp8:fp8,deepseek-v4-flash,qwen3-30b,qwen3-235b {commit} --json {rows}",
        headline=r"^part=",
    ),
    _every(
        "dispatch-sizes", "dispatch.md", 60,
        f"{_DISPATCH} --repeats 8 --backends {_NVSHMEM},all_to_all --routing zipf:0.5,one_rank "
        f"--graph-tokens 32,128 --eager-tokens 4096 --then --ranks {{gpus}} --repeats 8 {_SIZES} "
        "--backends nvshmem_low_latency:by_reference --graph-tokens 8,32,128 --eager-tokens '' "
        f"--then --ranks {{gpus}} --repeats 8 {_SIZES} --backends nvshmem_high_throughput --graph-tokens '' "
        "--eager-tokens 4096",
    ),
    _one(
        "gemm-sm80", "experts.md", 40,
        "{python} scripts/bench_gemm.py --ampere-only --no-skew {commit} --jsonl {rows}",
    ),
    # On the host's processor alone.
    _one(
        "layer-python", "runtime.md", 40, "{python} scripts/bench_layer_python.py {commit} --json {rows}",
        headline="a call takes",
    ),
    _one(
        "eplb-planning", "balancing.md", 240,
        *(f"{_PLANNING} {name} {{commit}} --json {{rows}}" for name in ("time", "rules", "quality")),
    ),
)  # fmt: skip
