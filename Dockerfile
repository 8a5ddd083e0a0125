# Two images from one file: `docker build --target cpu .` and `docker build --target cuda .`
# Neither holds model weights beyond the demo model inside the package: others land on the volume at /cache.

ARG PYTHON_IMAGE=python:3.12.12-slim-trixie
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# ---- the wheel, the same for both images
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels .

# ---- CPU: an environment, then an image without pip's caches and without a compiler
FROM ${PYTHON_IMAGE} AS cpu-environment
# Wheels of torch without CUDA: 200 MB instead of gigabytes. Their local version (+cpu) outranks the plain one.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/fovea
COPY constraints.txt /src/constraints.txt
COPY --from=wheel /wheels /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/fovea/bin/pip install --constraint /src/constraints.txt --extra-index-url "${TORCH_INDEX_URL}" /wheels/*.whl

FROM ${PYTHON_IMAGE} AS cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fovea" \
      org.opencontainers.image.description="Image chat over the OpenAI HTTP API (CPU)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=cpu-environment /opt/fovea /opt/fovea
# The volume belongs to the numeric user, so that Kubernetes can check runAsNonRoot.
RUN install --directory --owner=10001 --group=10001 --mode=0775 /cache
ENV PATH=/opt/fovea/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    SOURCE_REVISION=${REVISION}
VOLUME /cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('FOVEA_PORT', '8000') + '/health', timeout=4)"]
ENTRYPOINT ["fovea"]
CMD ["serve", "--host", "0.0.0.0"]

# ---- CUDA: `--compile`, and FlashInfer for other head widths, build kernels at first use: nvcc, a host compiler and
# Python's headers stay
FROM ${CUDA_IMAGE} AS cuda-base
ARG DEBIAN_FRONTEND=noninteractive
# The base image is pinned, and with it the distribution's release; its security updates are wanted as they are.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

FROM cuda-base AS cuda-environment
RUN python3.12 -m venv /opt/fovea
COPY constraints.txt /src/constraints.txt
COPY --from=wheel /wheels /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    wheel="$(echo /wheels/*.whl)" \
    && /opt/fovea/bin/pip install --constraint /src/constraints.txt "${wheel}[cuda]"
# FlashInfer's modules for these GPUs, compiled now instead of at the first start (nvcc, no GPU needed).
ARG FLASHINFER_CUDA_ARCH_LIST="8.0 8.6 8.9 9.0a 10.0a 12.0a"
RUN FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer FLASHINFER_CUDA_ARCH_LIST="${FLASHINFER_CUDA_ARCH_LIST}" \
    /opt/fovea/bin/python -m runtime.kernel_modules \
    && rm -rf /tmp/flashinfer

FROM cuda-base AS cuda
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fovea" \
      org.opencontainers.image.description="Image chat over the OpenAI HTTP API (CUDA)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=cuda-environment /opt/fovea /opt/fovea
RUN install --directory --owner=10001 --group=10001 --mode=0775 /cache
ENV PATH=/opt/fovea/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    SOURCE_REVISION=${REVISION}
VOLUME /cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('FOVEA_PORT', '8000') + '/health', timeout=4)"]
ENTRYPOINT ["fovea"]
CMD ["serve", "--host", "0.0.0.0"]
