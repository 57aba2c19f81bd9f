# An image with moe_ep, its extra for GPUs, transformers and Ray. No CUDA toolkit: kernels are compiled by NVRTC at first use.
#   docker build -t moe-ep:latest .
#   docker run --rm --gpus all --ipc host --cap-add IPC_LOCK --ulimit memlock=-1 -v /models:/models:ro moe-ep:latest \
#       run --model /models/checkpoint
# --ipc host (or --shm-size 16g) because ranks of a host exchange sizes through shared memory; IPC_LOCK and memlock for
# the registered memory of InfiniBand and RoCE cards.
ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim-bookworm

# rdma-core has the user-space drivers of the network cards; gcc is what Triton compiles its launchers with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/moe_ep
COPY pyproject.toml constraints.txt README.md LICENSE MANIFEST.in ./
COPY moe_ep moe_ep
COPY kernels kernels
COPY dispatch dispatch
COPY launch launch
RUN pip install --no-cache-dir -c constraints.txt ".[cuda,hf,metrics]"

# Ray's workers and compiled kernels need a home that the user may write.
RUN useradd --create-home --uid 1000 moe
USER moe
WORKDIR /home/moe
ENV PYTHONUNBUFFERED=1 \
    NCCL_NVLS_ENABLE=0 \
    MOE_EP_CACHE_DIR=/home/moe/.cache/moe_ep
ENTRYPOINT ["moe-ep"]
CMD ["doctor"]
