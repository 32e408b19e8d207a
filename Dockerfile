# The demo and the gate as an image:
#
#   docker build -t torch-grad-exporter .
#   docker run --rm -p 9100:9100 torch-grad-exporter                                 trains the demo, page on http://localhost:9100
#   docker run --rm -v "$PWD:/runs" torch-grad-exporter check /runs/run.json.gz      judges a saved run; add
#                                              --user "$(id -u)" where it is to write the verdict there with --junit
#
# PyPI's torch for Linux comes with CUDA, several gigabytes. For an image without it name PyTorch's own index of CPU builds:
# --build-arg PIP_INDEX_URL=... and --build-arg PIP_EXTRA_INDEX_URL=...
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY torch_grad_exporter torch_grad_exporter
COPY dashboards dashboards
COPY docs/runbook.md docs/runbook.md
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH=torch
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir "${TORCH}"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[web,grpc,plot]" && rm -r /wheels
RUN useradd --create-home --uid 10001 exporter
USER exporter
WORKDIR /home/exporter
EXPOSE 9100
STOPSIGNAL SIGINT
ENTRYPOINT ["torch-grad-exporter"]
CMD ["demo", "--port", "9100"]
