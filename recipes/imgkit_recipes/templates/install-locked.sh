#!/bin/sh
# Installs the Debian packages of a lock, exactly these.
# Usage: install-locked RECIPE LOCK, which only appear in messages.
# apt's own program downloads them: it knows the proxies, the credentials and the authorities of this image.
# packages.txt has a line for each package: SHA256 FILE MARK NAME:ARCHITECTURE URL...
# MARK is "auto" where the recipe does not name it. Kept packages lie in this folder already.
set -euf
recipe=$1 lock=$2
cd "$(dirname "$0")"
here=$(pwd)

whole() { # FILE SHA256
    [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status -
}

# One call for all packages: their own place first, then the snapshot service at two times.
for place in 1 2 3; do
    set -- "$place"
    while read -r sha256 file mark name urls; do
        if ! whole "$file" "$sha256"; then
            rm -f -- "$file"
            url=$(echo "$urls" | cut -d ' ' -f "$place" -s)
            [ "$place" != 1 ] || url=${urls%% *}
            case $url in
                https://snapshot.*) [ -z "${IMGKIT_SNAPSHOT:-}" ] || url=$IMGKIT_SNAPSHOT/${url#https://*/} ;;
            esac
            [ -z "$url" ] || set -- "$@" "$url" "$here/$file" "SHA256:$sha256"
        fi
    done < packages.txt
    shift
    [ $# = 0 ] || /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file "$@" || :
done

missing=
while read -r sha256 file mark name urls; do
    whole "$file" "$sha256" || missing="$missing $file"
done < packages.txt
if [ -n "$missing" ]; then
    echo "imgkit: no longer where the lock found it, nor in the distribution's snapshot service:$missing" >&2
    echo "imgkit: to lock newer packages: imgkit lock $recipe --upgrade; where somebody still has these files," \
        "put them into $lock.files/ (imgkit lock $recipe --keep-files stores all of them there)" >&2
    exit 1
fi

# A file on apt's command line counts as wanted by the user. What apt would have added by itself does not.
apt-mark showmanual > wanted.txt
set --
while read -r sha256 file mark name urls; do
    set -- "$@" "$here/$file"
done < packages.txt
mkdir lists
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o Dir::State::Lists="$here/lists" "$@"
set --
while read -r sha256 file mark name urls; do
    [ "$mark" != auto ] || grep -qxF -e "$name" -e "${name%:*}" wanted.txt || set -- "$@" "$name"
done < packages.txt
[ $# = 0 ] || apt-mark auto "$@" > /dev/null
