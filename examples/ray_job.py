"""Submits `moe-ep` to a Ray cluster as a job, follows its output, and ends with its exit code.

    python examples/ray_job.py http://127.0.0.1:8265 run --ep-size 4

From a checkout it does what this line does, from any folder and without packing what the job does not need; where
moe_ep is installed, the cluster must have it installed too:

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python -m moe_ep.launch run --ep-size 4

Newer Ray starts clusters with a token (~/.ray/auth_token); set RAY_AUTH_MODE=token for either way to send it.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

CHECKOUT = Path(__file__).resolve().parent.parent
NOT_NEEDED = [".?*", "build", "dist", "docs", "tests"]  # ".*" would match "." and so the whole folder


async def submit(address: str, arguments: list[str]) -> int:
    """Runs `moe-ep ARGUMENTS` on the cluster whose dashboard is at `address`; returns 0 where it succeeded."""
    client = JobSubmissionClient(address)
    is_checkout = (CHECKOUT / "pyproject.toml").is_file()
    job = client.submit_job(
        entrypoint=shlex.join(["python", "-m", "moe_ep.launch", *arguments]),
        runtime_env={"working_dir": str(CHECKOUT), "excludes": NOT_NEEDED} if is_checkout else None,
    )
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    return 0 if client.get_job_status(job) == JobStatus.SUCCEEDED else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print("usage: python examples/ray_job.py DASHBOARD_ADDRESS COMMAND [OPTION ...]", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(asyncio.run(submit(sys.argv[1], sys.argv[2:])))
    except (ConnectionError, ValueError, RuntimeError) as error:  # what Ray raises for an address, a token or a refusal
        sys.exit(f"examples/ray_job.py: {error}")
