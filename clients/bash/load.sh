#!/usr/bin/env bash
# A loader: puts the lines of its input through a handler, and prints the results in input order.
#
#   STREAMQ_GATEWAY=http://127.0.0.1:8470 ./load.sh ID HANDLER <lines.txt >results.txt
#
# The same command again after a crash goes on where the first one ended. OPTIONS='{"limit": 40}' has the other
# members of POST /v1/requests. The exit code is 1 if parts failed.
set -eu
HERE=$(dirname -- "$(readlink -f -- "$0")")
# shellcheck source=gateway.sh
. "$HERE/gateway.sh"
[ $# = 2 ] || { echo "usage: load.sh ID HANDLER <lines.txt >results.txt" >&2; exit 2; }
ID=$1 HANDLER=$2 CHUNK=500
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
cd "$FOLDER"

jq -cn --arg id "$ID" --arg handler "$HANDLER" --arg queue "$QUEUE" --argjson options "${OPTIONS:-{\}}" \
  '{id: $id, handler: $handler, queue: $queue, state: "loading"} + $options' >said
call POST /v1/requests status said
OF_IT="/v1/requests/$(jq -rn --arg id "$ID" '$id | @uri')"

if [ "$(jq -r .state status)" = loading ]; then
  THERE=$(jq .parts.total status)
  TOTAL=$THERE
  # Lines that are there already are skipped; the others go in chunks, parts run meanwhile.
  tail -n +$((THERE + 1)) | jq -Rc '{text: .}' >parts
  split -l "$CHUNK" -a 6 parts chunk.
  for chunk in chunk.*; do
    [ -e "$chunk" ] || break
    jq -sc --argjson first $((TOTAL + 1)) '{first: $first, parts: .}' "$chunk" >said
    call POST "$OF_IT/parts" answer said
    TOTAL=$(jq .total answer)
  done
  echo "{\"total\": $TOTAL}" >said
  call POST "$OF_IT/seal" answer said
fi

STATUS=202
while [ "$STATUS" = 202 ]; do call GET "$OF_IT/wait?wait_s=25" status; done

FROM=1
until [ "$FROM" = over ]; do
  call GET "$OF_IT/results?from=$FROM&most=1000" lines
  jq -r 'select(.part) | .result | if . == null then "null" else .text // .lines // (.base64 | values | @base64d) // (.json | tojson) end' lines
  FROM=$(tail -n 1 lines | jq -r 'if .is_over then "over" else .next end')
done
[ "$(jq .parts.failed status)" = 0 ] || { echo "$(jq .parts.failed status) parts failed" >&2; exit 1; }
