#!/bin/sh
# Installs the Debian packages of a lock, exactly these. apt's own program downloads them: it knows the proxies, the
# credentials and the authorities of this image.
#
# packages.txt has a line for each: SHA256 FILE MARK NAME:ARCHITECTURE URL...
# MARK is "auto" for a package that the recipe does not name. Kept packages lie here already.
set -euf
cd "$(dirname "$0")"
here=$(pwd)

download() {
    /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file "$@"
}

whole() { # FILE SHA256
    [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status -
}

# All in one call first, so that apt uses one connection for many. Failures come up below.
set --
while read -r sha256 file mark name urls; do
    [ -f "$file" ] || set -- "$@" "${urls%% *}" "$here/$file" "SHA256:$sha256"
done < packages.txt
[ $# = 0 ] || download "$@" || :

missing=
while read -r sha256 file mark name urls; do
    for url in $urls; do
        whole "$file" "$sha256" && break
        case $url in
            https://snapshot.*) [ -z "${IMGKIT_SNAPSHOT:-}" ] || url=$IMGKIT_SNAPSHOT/${url#https://*/} ;;
        esac
        rm -f -- "$file"
        download "$url" "$here/$file" "SHA256:$sha256" || :
    done
    whole "$file" "$sha256" || missing="$missing $file"
done < packages.txt
if [ -n "$missing" ]; then
    for file in $missing; do
        echo "imgkit: the lock's $file has vanished: it is not where it was, nor in the snapshot service" >&2
    done
    echo "imgkit: take newer packages: imgkit lock RECIPE --upgrade; where somebody still has these files, put" \
        "them into RECIPE.lock.files/ (imgkit lock --keep stores all of them there)" >&2
    exit 1
fi

# A file on the command line counts as one that the user wants; packages that apt would have added do not.
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
