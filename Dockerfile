# Images of the processes; docker-compose.yml says which of them a container is.
#     docker build .                        everything, for a CPU; --build-arg EXTRA=vllm: for NVIDIA GPUs
#     docker build --target buffer .        the buffer service alone, without torch
FROM python:3.11-slim AS base

# Where pip finds PyTorch's CPU wheels (EXTRA=cpu); without them it picks a CUDA build.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

WORKDIR /srv/slipstream
# User 1000. A named volume takes its owner from the folder it is first mounted on.
RUN useradd --create-home slipstream && install -d -o slipstream /runs
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    pip install -c constraints.txt --upgrade pip
VOLUME /runs
CMD ["slipstream", "--help"]


FROM base AS buffer

RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    pip install -c constraints.txt --group buffer
COPY configs configs
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,target=/src,rw \
    pip install --no-deps /src
USER 1000


FROM base

# libnuma1: vLLM's CPU kernels link to it. gcc: Triton compiles launchers while running on a GPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG EXTRA=cpu
# Before the project itself, whose changes would repeat it. For a CPU the same steps as in the Makefile, for the same
# reasons.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    case "$EXTRA" in \
        cpu) pip install -c constraints.txt torch \
            && pip install --no-deps -r constraints.txt ;; \
        vllm) python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *extras["vllm"], *extras["swanlab"], sep="\n")' > /tmp/requirements.txt \
            && pip install -c constraints.txt -r /tmp/requirements.txt ;; \
        *) echo "EXTRA=$EXTRA: must be cpu or vllm" >&2; exit 1 ;; \
    esac
COPY configs configs
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,target=/src,rw \
    pip install --no-deps --no-build-isolation /src
USER 1000
