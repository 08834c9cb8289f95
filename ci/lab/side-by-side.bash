# shellcheck shell=bash disable=SC2154 # the caller sets `logs`
# Sourced by ci/check and ci/quickstart: commands that run side by side. The caller sets `logs`, a folder for KEY.log and
# KEY.ended, which holds the exit code and the seconds.
#
# Changes: those two files, and processes.
# Undo: the caller runs end_all at its end, and removes its folder.

# Each command is a process group of its own, so that an interrupt ends all of it.
declare -A group # key to process
beside() { # key, command...
  local key=$1 start=$SECONDS
  shift
  set -m
  (
    code=0
    "$@" || code=$?
    echo "$code $((SECONDS - start))" >"$logs/$key.ended"
  ) >"$logs/$key.log" 2>&1 </dev/null &
  group[$key]=$!
  set +m
}
ended() { [ -e "$logs/$1.ended" ]; }
# Wait for a command, print what it printed, and set the caller's `code` and `seconds`; without an end, they stay.
collect() { # key
  wait "${group[$1]}" || true
  unset "group[$1]"
  cat "$logs/$1.log"
  # shellcheck disable=SC2034 # the caller reads both
  if ended "$1"; then read -r code seconds <"$logs/$1.ended"; fi
}
end_all() {
  local key
  for key in "${!group[@]}"; do kill -TERM -- "-${group[$key]}" 2>/dev/null || true; done
  wait
}
