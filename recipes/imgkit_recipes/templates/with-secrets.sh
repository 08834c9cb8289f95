#!/bin/sh
# Runs one step of a build with secrets, then refuses the step if a file that it wrote holds one of them.
# Usage: with-secrets ID[=VARIABLE]... -- COMMAND...
# Secrets lie in /run/secrets, patterns in /dev/shm: neither is part of the image.
set -u
names=
while [ "$1" != -- ]; do
    name=${1%%=*}
    if [ ! -s "/run/secrets/$name" ]; then
        echo "imgkit: the builder gave no secret $name, or an empty one: --secret id=$name,..." >&2
        exit 1
    fi
    case $1 in
        *=*) export "${1#*=}=$(cat "/run/secrets/$name")" ;;
    esac
    names="$names $name"
    shift
done
shift

began=/dev/shm/imgkit-began patterns=/dev/shm/imgkit-patterns
# A second earlier: a file system's clock ticks more slowly than a step writes.
touch -d "@$(($(date +%s) - 1))" "$began" || exit

"$@" || exit

for name in $names; do
    # The value, or each line of a file; short lines and the frame of a key are in many files.
    grep -E '.{8}' "/run/secrets/$name" | grep -v -e '^-----' > "$patterns"
    if [ ! -s "$patterns" ]; then
        echo "imgkit: the secret $name has no line of 8 characters: imgkit cannot look for it" >&2
        exit 1
    fi
    # Not the modification time, which an unpacked file brings along.
    found=$(find / -xdev -type f -cnewer "$began" ! -path '/run/secrets/*' ! -path '/proc/*' \
        -exec grep -lF -f "$patterns" {} +)
    if [ -n "$found" ]; then
        echo "imgkit: this step wrote the secret $name, which would be in the image, into:" >&2
        echo "$found" >&2
        exit 1
    fi
done
