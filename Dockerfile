# docker build -t repro . && docker run --rm repro
#
# Linux on x86-64, without a GPU. What runs is the first tier of ARTIFACT.md, 'docker run --rm repro repro reproduce --tier short' runs the next.
FROM python:3.11.7-slim-bookworm
# g++ compiles the simulator's inner loops, bubblewrap confines programs that a model wrote, git tells runs their commit.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /repro
COPY requirements.lock ./
RUN pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.lock)" \
 && pip install --no-cache-dir --no-deps -r requirements.lock
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
ENV OMP_NUM_THREADS=1
CMD ["repro", "reproduce", "--tier", "kick-tires"]
