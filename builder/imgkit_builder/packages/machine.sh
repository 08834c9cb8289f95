# The steps of `imgkit add` on the machine that has the image: this machine, or a remote over ssh.
#
#   look IMAGE TARGET TOKEN             print the image's digest, and the size and end of a file that exists
#   install IMAGE TARGET TOKEN SIZE PROGRAM MODULES [OPTION...]
#                                       run inside.py in the image, and make a squashfs of the result. The
#                                       standard input is a tar of SIZE bytes, with inside.py and its request
#   publish IMAGE TARGET TOKEN SIZE     append the record, which is SIZE bytes of the standard input, and give
#                                       the file its name
#
# A step that cannot be done prints "problem NAME"; failures.py has the messages. Until the last rename, all
# files are in one hidden folder beside the target. Each command has its own folder TOKEN in it.
#
# add.py sets $inside, the path of the folder TOKEN in the container, $end_bytes, the size of the end of a file,
# and the function digest_of_image.

# The variables of the machine that pip in the image gets. The others do not fit an image, for example paths.
variables="http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY
    PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST"
mask=$(umask)
umask 077
step=$1 image=$2 target=$3 token=$4
shift 4
parent=${target%/*}
folder=$parent/.packages.${target##*/}
work=$folder/$token

problem() {
    echo "problem $1"
    exit 0
}

# Keep other commands out of the folder until this script and the programs that it starts have ended. flock
# exits with 1 if another process has the lock, and with other codes if the file system has no locks.
take_lock() {
    mkdir -p -- "$folder" || exit 1
    # shellcheck disable=SC3067 # dash, bash and busybox know -O
    if [ -L "$folder" ] || [ ! -O "$folder" ]; then problem not-writable; fi
    exec 9> "$folder/lock"
    flock -n 9
    if [ $? = 1 ]; then problem busy; fi
    # The command that had the lock before may have removed its file.
    if [ ! "$folder/lock" -ef /dev/fd/9 ]; then problem busy; fi
}

# pip makes folders into which the user may not write.
clean() {
    chmod -R u+w "$folder"
    rm -rf "$folder"
}

fail() {
    echo "$1" >&2
    exit 1
}

case $step in
look)
    if [ ! -e "$image" ]; then problem no-image; fi
    # Each .sif has this word at byte 32.
    magic=$(head -c 42 "$image" 2> /dev/null | tail -c 10 | tr -d '\000')
    if [ "$magic" != SIF_MAGIC ]; then problem no-sif; fi
    if [ ! -d "$parent" ]; then problem no-folder; fi
    if [ ! -w "$parent" ] || [ ! -x "$parent" ]; then problem not-writable; fi
    digest_of_image
    if [ -e "$target" ]; then
        stat -L -c %s -- "$target"
        tail -c "$end_bytes" -- "$target" || exit 1
    fi
    ;;
install)
    size=$1 program=$2 modules=$3
    shift 3
    if [ -n "$modules" ]; then
        # shellcheck disable=SC2016 # bash -l expands them
        PATH=$(bash -lc 'module load $1 > /dev/null 2>&1; echo; echo "$PATH"' bash "$modules" < /dev/null | tail -n 1)
    fi
    program=$(command -v "$program") || problem no-runtime
    # A runtime may bring its own mksquashfs.
    libexec=${program%/*}/../libexec
    PATH=$PATH:/usr/sbin:/sbin:$libexec/apptainer/bin:$libexec/singularity/bin
    command -v mksquashfs > /dev/null || problem no-mksquashfs
    take_lock
    rm -rf "$folder"/[0-9a-f]* # of commands that were killed
    trap 'clean 2> /dev/null' EXIT
    trap 'exit 1' HUP INT TERM
    mkdir -p "$work/tmp" || exit 1
    head -c "$size" | tar -xpf - -C "$work" || exit 1
    for name in $variables; do
        eval "value=\${$name-}"
        if [ -n "$value" ]; then export "APPTAINERENV_$name=$value" "SINGULARITYENV_$name=$value"; fi
    done
    # The image does not have the certificates of a site.
    for file in "$PIP_CERT" "$REQUESTS_CA_BUNDLE" "$SSL_CERT_FILE"; do
        if [ -f "$file" ]; then
            set -- "$@" --bind "$file:$inside.pem:ro"
            break
        fi
    done
    exec 3<&0 < /dev/null
    cd / || exit 1
    # Of this machine, the container gets only the network: variables, the home folder and /tmp would change
    # what pip does. What the runtime leaves in TMPDIR when it is killed, the next command removes.
    TMPDIR=$work/tmp "$program" --quiet exec --containall --no-home --pwd / --bind "$work:$inside" "$@" \
        "$image" python3 -s "$inside/inside.py" 2>&1 3<&- &
    container=$!
    # imgkit holds the standard input open. It ends when imgkit is killed or the connection is lost.
    (
        trap '' HUP INT TERM
        exec 9>&-
        cat <&3
        kill "$container"
        clean
    ) > /dev/null 2>&1 &
    watcher=$!
    exec 3<&-
    trap 'kill -9 "$watcher"; clean 2> /dev/null' EXIT
    wait "$container" || fail "$program failed with exit code $?"
    echo
    echo "$token"
    cat "$work/answer.json"
    echo
    if ! grep -q '^{"failure"' "$work/answer.json"; then
        set -- "$work/root" "$work/out" -noappend -no-progress -all-root -no-xattrs -processors 4 -mem 512M
        umask "$mask" # others may read the file
        # Not every mksquashfs was built with zstd.
        mksquashfs "$@" -comp zstd -Xcompression-level 3 > "$work/log" 2>&1 ||
            mksquashfs "$@" > "$work/log" 2>&1 ||
            fail "mksquashfs failed: $(tail -n 5 "$work/log")"
        sha256sum < "$work/out"
    fi
    kill -9 "$watcher"
    if [ -e "$work/out" ]; then trap - EXIT; fi
    ;;
publish)
    if [ ! -e "$work/out" ]; then problem busy; fi
    take_lock
    trap 'clean 2> /dev/null' EXIT
    head -c "$1" >> "$work/out" || exit 1
    sync -- "$work/out"
    mv -f -- "$work/out" "$target" && stat -c %s -- "$target"
    ;;
esac
