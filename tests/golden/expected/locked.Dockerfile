# locked for linux/amd64, rendered by imgkit for Docker's classic builder. Edit locked.yaml, not this text.
# The comment above each instruction names its line in the recipe; `imgkit:` marks imgkit's own steps.

# locked.yaml:3
FROM nvcr.io/nvidia/pytorch@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb

# locked.yaml:4
COPY ["imgkit/locked-apt/", "/opt/imgkit/locked-apt/"]
# locked.yaml:4
RUN sh /opt/imgkit/locked-apt/install-locked.sh locked.yaml locked.lock \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /opt/imgkit/locked-apt

# imgkit: every pip step below must keep the base's torch and NCCL
RUN mkdir -p /opt/imgkit \
    && python3 -m pip list --format=freeze --disable-pip-version-check > /opt/imgkit/constraint.txt \
    && sed -n -i -E '/^(torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+)==/Ip' /opt/imgkit/constraint.txt

# locked.yaml:6
COPY ["imgkit/requirements-0.txt", "/opt/imgkit/requirements-0.txt"]
# locked.yaml:6
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --extra-index-url https://index.example.org/simple \
        --require-hashes --no-deps --only-binary=:all: \
        --requirement /opt/imgkit/requirements-0.txt \
    || { echo 'imgkit: where an index no longer has a wheel of the lock: imgkit lock locked.yaml --upgrade, or put the wheel into locked.lock.files/ (imgkit lock locked.yaml --keep-files stores all of them there)' >&2; exit 1; }

# locked.yaml:8
COPY ["imgkit/requirements-1.txt", "/opt/imgkit/requirements-1.txt"]
# locked.yaml:8
COPY ["imgkit/locked-pip-1/", "/opt/imgkit/locked-pip-1/"]
# locked.yaml:8
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --require-hashes --no-deps --only-binary=:all: \
        --find-links /opt/imgkit/locked-pip-1 \
        --requirement /opt/imgkit/requirements-1.txt \
    || { echo 'imgkit: where an index no longer has a wheel of the lock: imgkit lock locked.yaml --upgrade, or put the wheel into locked.lock.files/ (imgkit lock locked.yaml --keep-files stores all of them there)' >&2; exit 1; } \
    && rm -rf /opt/imgkit/locked-pip-1

# imgkit: ignore packages in the host's ~/.local
ENV PYTHONNOUSERSITE="1"

# imgkit: the default folder
WORKDIR "/workspace"

# imgkit: the entry points, made of the imgkit that builds this image, so that both have the same version
COPY ["imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl", "/opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl"]
# imgkit: no index, no dependencies; forced, because a changed wheel can have the same version
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT='' \
    python3 -m pip install --no-cache-dir --no-compile --no-index --no-deps --force-reinstall \
        /opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl \
    && PYTHONHASHSEED=0 python3 -s -X no_debug_ranges -m compileall -q --invalidation-mode checked-hash \
        "$(python3 -IBc 'import imgkit_entrypoints as it; print(it.__path__[0])')"

# locked.yaml:9
COPY ["project/2/", "/opt/project/"]
# locked.yaml:9
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --no-deps --editable /opt/project

# imgkit: facts about the system and provenance; late, because they change with every commit
COPY ["imgkit/system.json", "imgkit/manifest.json", "imgkit/lock.toml", "/opt/imgkit/"]

# imgkit: what this image is
LABEL org.opencontainers.image.title="locked" \
    org.opencontainers.image.version="VERSION" \
    imgkit.recipe="locked" \
    imgkit.recipe.sha256="SHA256" \
    imgkit.version="VERSION" \
    imgkit.lock.sha256="42de846646b479c31a5f0a3a91b01961bb96d27fdf30014519139d957e84d6e7"
