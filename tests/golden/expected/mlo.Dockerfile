# mlo for linux/amd64, rendered by imgkit for Docker's classic builder. Edit mlo.yaml, not this text.
# The comment above each instruction names the recipe line behind it; `imgkit:` marks imgkit's own steps.

# rcp.yaml:9
FROM nvcr.io/nvidia/pytorch:24.03-py3

# rcp.yaml:11
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        tmux \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*

# imgkit: packages of the host's ~/.local stay out
ENV PYTHONNOUSERSITE="1"

# imgkit: the default folder
WORKDIR "/workspace"

# imgkit: the entry points, cut out of the imgkit that makes this image, so that both are of one version
COPY ["imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl", "/opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl"]
# imgkit: no index and no dependencies; reinstalled by force because a changed wheel can bear the same version
RUN PYTHONDONTWRITEBYTECODE=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT='' \
    python3 -m pip install --no-cache-dir --no-index --no-deps --force-reinstall \
        /opt/imgkit/imgkit_entrypoints-VERSION-py3-none-any.whl

# imgkit: facts of the system and provenance; late, because they change with every commit
COPY ["imgkit/system.json", "imgkit/manifest.json", "/opt/imgkit/"]

# imgkit: what this image is
LABEL org.opencontainers.image.title="mlo" \
    org.opencontainers.image.version="VERSION" \
    org.opencontainers.image.description="EPFL's MLO group on RCP, by RunAI" \
    imgkit.recipe="mlo" \
    imgkit.recipe.sha256="SHA256" \
    imgkit.version="VERSION"
