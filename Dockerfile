# One image for buffer, rollout servers and learners; docker-compose.yml says which of them a container is.
#     docker build --build-arg EXTRA=cpu .      (or EXTRA=vllm, for NVIDIA GPUs)
FROM python:3.11-slim

ARG EXTRA=cpu
# Where pip finds PyTorch's CPU wheels (EXTRA=cpu); without them it picks a CUDA build.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

# libnuma1: vLLM's CPU kernels link to it. gcc: Triton compiles launchers while running on a GPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/slipstream
COPY . .

# For a CPU the same steps as in the Makefile, for the same reasons.
RUN --mount=type=cache,target=/root/.cache/pip \
    case "$EXTRA" in \
        cpu) pip install -c constraints.txt torch \
            && pip install --no-deps -r constraints.txt \
            && pip install --no-deps --no-build-isolation . ;; \
        vllm) pip install -c constraints.txt ".[vllm,trackers]" ;; \
        *) echo "EXTRA=$EXTRA: must be cpu or vllm" >&2; exit 1 ;; \
    esac

# A named volume takes its owner from the folder it is first mounted on.
RUN useradd --create-home slipstream && install -d -o slipstream /runs
USER slipstream
VOLUME /runs
CMD ["slipstream", "--help"]
