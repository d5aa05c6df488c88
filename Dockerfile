# docker build -t fpipe .                                            CPU
# docker build -t fpipe --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .     CUDA
# docker run -it fpipe make demo
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A C++ compiler for torch.compile and the test accelerator; git and make for the Makefile.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /fpipe
COPY . .
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX}
RUN make .venv/.installed
ENV PATH=/fpipe/.venv/bin:${PATH}
CMD ["python"]
