# cpu for linux/amd64, rendered by imgkit for Docker's classic builder. Edit cpu.yaml, not this text.
# The comment above each instruction names its line in the recipe; `imgkit:` marks imgkit's own steps.

# cpu.yaml:5
FROM python:3.11-slim-bookworm

# imgkit: every pip step below must keep the base's torch and NCCL
RUN mkdir -p /opt/imgkit \
    && python3 -m pip list --format=freeze --disable-pip-version-check > /opt/imgkit/constraint.txt \
    && sed -n -i -E '/^(torch|torchvision|torchaudio|triton|pytorch[-_.]triton|nvidia[-_.]nccl[-_.]cu[0-9]+)==/Ip' /opt/imgkit/constraint.txt

# cpu.yaml:11
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install --no-cache-dir --constraint /opt/imgkit/constraint.txt \
        --index-url https://download.pytorch.org/whl/cpu \
        'torch>=2.3' \
        numpy

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

# imgkit: facts about the system and provenance; late, because they change with every commit
COPY ["imgkit/system.json", "imgkit/manifest.json", "/opt/imgkit/"]

# imgkit: what this image is
LABEL org.opencontainers.image.title="cpu" \
    org.opencontainers.image.version="VERSION" \
    org.opencontainers.image.description="CPU only, for a laptop or CI" \
    imgkit.recipe="cpu" \
    imgkit.recipe.sha256="SHA256" \
    imgkit.version="VERSION"
