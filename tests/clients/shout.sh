#!/usr/bin/env bash
# What bash workers of the tests run: shouts, slowly if PAUSE_S says so. With HANG it hangs in its first part.
note() { [ -z "${NOTES:-}" ] || echo "$1 $EPOCHREALTIME $WORKER $REQUEST $PART" >>"$NOTES"; }
note S
if [ -n "${HANG:-}" ]; then
  mkdir "$HANG/bash"
  exec sleep 150  # it outlives a worker that is killed
fi
[ -z "${PAUSE_S:-}" ] || sleep "$PAUSE_S"
tr a-z A-Z
note E
