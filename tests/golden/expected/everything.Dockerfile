# everything for linux/amd64, rendered by imgkit for Docker's classic builder. Edit everything.yaml, not this text.
# The comment above each instruction names its line in the recipe; `imgkit:` marks imgkit's own steps.

# base-of-everything.yaml:3
FROM nvcr.io/nvidia/pytorch:25.05-py3

# everything.yaml:6
COPY ["imgkit/ca-0.crt", "/usr/local/share/ca-certificates/imgkit-ca-0.crt"]
# everything.yaml:6
RUN if [ -f "${PIP_CERT:-}" ] && [ "$PIP_CERT" != /etc/ssl/certs/ca-certificates.crt ]; then \
        cp -- "$PIP_CERT" /usr/local/share/ca-certificates/imgkit-base.crt; fi; \
    if command -v update-ca-certificates > /dev/null; then update-ca-certificates; \
    else mkdir -p /etc/ssl/certs && cat /usr/local/share/ca-certificates/*.crt >> /etc/ssl/certs/ca-certificates.crt; fi
# everything.yaml:6
ENV CURL_CA_BUNDLE="/etc/ssl/certs/ca-certificates.crt" \
    PIP_CERT="/etc/ssl/certs/ca-certificates.crt" \
    REQUESTS_CA_BUNDLE="/etc/ssl/certs/ca-certificates.crt" \
    SSL_CERT_FILE="/etc/ssl/certs/ca-certificates.crt"

# base-of-everything.yaml:5, everything.yaml:8-9
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        git \
        vim=2:9.0.1378-2 \
        less \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*

# imgkit: every pip step below must keep the base's torch and NCCL
RUN mkdir -p /opt/imgkit \
    && python3 -m pip list --format=freeze --disable-pip-version-check > /opt/imgkit/constraint.txt \
    && sed -n -i -E '/^(torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+)==/Ip' /opt/imgkit/constraint.txt

# everything.yaml:19
RUN if [ -n "${PIP_CONSTRAINT:-}" ]; then \
        sed -E '/^(flash[-_.]+attn|typing[-_.]+extensions)([^A-Za-z0-9._-]|$)/Id' "$PIP_CONSTRAINT" > /opt/imgkit/base-constraint.txt; \
    else : > /opt/imgkit/base-constraint.txt; fi

# everything.yaml:10
COPY ["imgkit/uv.json", "/opt/imgkit/uv.json"]
# everything.yaml:10
COPY ["imgkit/inside_uv.py", "/opt/imgkit/inside_uv.py"]
# everything.yaml:10
RUN python3 -I -B /opt/imgkit/inside_uv.py /opt/imgkit \
    && PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --require-hashes --no-deps --only-binary=:all: \
        --requirement /opt/imgkit/requirements-uv.txt

# everything.yaml:12
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    MAX_JOBS=8 \
    CFLAGS='-O2 -DX='"'"'1'"'"'' \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        'numpy>=1.26,<3' \
        'accelerate[rich]'

# everything.yaml:14
COPY ["imgkit/requirements-1.txt", "/opt/imgkit/requirements-1.txt"]
# everything.yaml:14
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --no-build-isolation \
        --requirement /opt/imgkit/requirements-1.txt

# everything.yaml:16
COPY ["imgkit/requirements-2.txt", "/opt/imgkit/requirements-2.txt"]
# everything.yaml:16
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --no-deps \
        --requirement /opt/imgkit/requirements-2.txt

# everything.yaml:17
COPY ["imgkit/requirements-3.txt", "/opt/imgkit/requirements-3.txt"]
# everything.yaml:17
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --requirement /opt/imgkit/requirements-3.txt

# everything.yaml:21-22
ENV PYTHONNOUSERSITE="1" \
    GREETING="it's \"\$HOME\" \\ # grüße" \
    HF_HOME="/scratch/hf cache"

# everything.yaml:28
WORKDIR "/workspace/code"

# everything.yaml:24
RUN python3 -c 'print("hello")' > /dev/null

# everything.yaml:25
RUN ["/bin/sh", "-c", "[ -n \"$HF_HOME\" ]"]

# everything.yaml:26
RUN ["/bin/sh", "-c", "cat /etc/os-release > /dev/null # <<EOF"]

# imgkit: the entry points, made of the imgkit that builds this image, so that both have the same version
COPY ["imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl", "/opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl"]
# imgkit: no index, no dependencies; forced, because a changed wheel can have the same version
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT='' \
    python3 -m pip install --no-cache-dir --no-compile --no-index --no-deps --force-reinstall \
        /opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl \
    && PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash \
        "$(python3 -IBc 'import imgkit_entrypoints as it; print(it.__path__[0])')"

# everything.yaml:16
COPY ["project/2/", "/opt/imgkit/project/2/"]
# everything.yaml:16
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --no-deps \
        /opt/imgkit/project/2 \
    && rm -rf /opt/imgkit/project

# everything.yaml:17
COPY ["project/3/", "/opt/project/"]
# everything.yaml:17
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --editable /opt/project

# everything.yaml:30
COPY ["copy/0/", "/workspace/code/"]

# everything.yaml:33
COPY ["copy/1/", "/opt/tools/"]

# everything.yaml:27
RUN python3 hello.py

# imgkit: facts about the system and provenance; late, because they change with every commit
COPY ["imgkit/system.json", "imgkit/manifest.json", "/opt/imgkit/"]

# everything.yaml:36-37
LABEL org.opencontainers.image.title="everything" \
    org.opencontainers.image.version="VERSION" \
    org.opencontainers.image.description="every field of the image part" \
    org.opencontainers.image.authors="A \"B\" C\$" \
    team="images" \
    imgkit.recipe="everything" \
    imgkit.recipe.sha256="SHA256" \
    imgkit.version="VERSION"
