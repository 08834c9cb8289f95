# olivia for linux/arm64, rendered by imgkit for Docker's classic builder. Edit olivia.yaml, not this text.
# The comment above each instruction names its line in the recipe; `imgkit:` marks imgkit's own steps.

# olivia.yaml:10
FROM nvcr.io/nvidia/pytorch:26.03-py3

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
LABEL org.opencontainers.image.title="olivia" \
    org.opencontainers.image.version="VERSION" \
    org.opencontainers.image.description="Olivia in production, arm64 and Slurm" \
    imgkit.recipe="olivia" \
    imgkit.recipe.sha256="SHA256" \
    imgkit.version="VERSION"
