# surefoot in an image. TORCH_INDEX is the package index of the build of torch, for the CPU or for a version of CUDA:
# https://pytorch.org/get-started/locally/ names it. Without TORCH_INDEX, pip installs its default build, which needs gigabytes.
#
#   docker build -t surefoot --build-arg TORCH_INDEX=URL .
#   mkdir -p runs
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/training/runs" surefoot train gpt --run-dir runs/first
#
# With a CUDA build:
#
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD/runs:/training/runs" surefoot train gpt --run-dir runs/first
# This base image was never pulled in a test: the image was built on another one, of Debian 12 with Python 3.11.
ARG BASE=python:3.11-slim
FROM ${BASE}

# torch.compile needs a C++ compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# torch first and by itself, so that a change of surefoot does not download it again
ARG TORCH_INDEX=""
WORKDIR /opt/surefoot
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch

# the recipe gpt needs the extra `text`
ARG EXTRAS="[text]"
COPY pyproject.toml README.md LICENSE* ./
COPY src ./src
RUN python -m pip install --no-cache-dir -c constraints.txt ".${EXTRAS}"

# any user id can write /training, its home directory: --user makes the files of a mounted directory yours
RUN useradd --uid 1000 --home-dir /training --no-create-home surefoot && install --directory --mode 1777 /training
ENV HOME=/training \
    USER=surefoot \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /training
ENTRYPOINT ["surefoot"]
CMD ["--help"]
