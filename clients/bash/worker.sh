#!/usr/bin/env bash
# A worker: runs a program for each part. The program reads the payload from its input and writes the result to
# its output. If it ends with another code than 0, the part is run again later, and its messages are the reason.
#
#   STREAMQ_GATEWAY=http://127.0.0.1:8470 ./worker.sh [-n SLOTS] [-m MOST] HANDLER PROGRAM [WORD...]
#   ./worker.sh -n 4 shout tr a-z A-Z
#
# Programs find the number of the part, its attempt and the request in $PART, $ATTEMPT and $REQUEST.
# TERM and INT: running programs end, their results are reported, and nothing else is begun.
set -u
HERE=$(dirname -- "$(readlink -f -- "$0")")
# shellcheck source=gateway.sh
. "$HERE/gateway.sh"

usage() { echo "usage: worker.sh [-n SLOTS] [-m MOST] HANDLER PROGRAM [WORD...]" >&2; exit 2; }
SLOTS=1 MOST=50
while getopts n:m: option; do
  case $option in n) SLOTS=$OPTARG ;; m) MOST=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
[ $# -ge 2 ] || usage
HANDLER=$1
shift
PROGRAM=("$@")

# What this worker wants. A report asks for more, too; not for long, because it cannot be broken off as a take can.
ASK=$(jq -cn --arg queue "$QUEUE" --arg handler "$HANDLER" --argjson most "$MOST" --argjson slots "$SLOTS" \
  --arg name "$(hostname | cut -c1-50).$$" \
  '{queue: $queue, handlers: [$handler], most: $most, wait_s: 25, lease_s: 4, name: $name, slots: $slots}') || usage

# beat: says every second that the slot lives and which part it runs. Ends the program if nobody wants its result.
beat() {
  local program
  LONGEST=2
  while sleep 1; do
    GIVE_UP=$(($(date +%s) + 2))
    kill -0 "$$" 2>/dev/null || exit  # the worker was killed
    jq -c --argjson part "$(<part)" '{tickets: [{ticket, part: $part}]}' held >beat
    call POST /v1/beat verdict beat 2>/dev/null || continue
    [ "$(jq '.unwanted | length' verdict)" = 0 ] && continue
    : >unwanted
    program=$(<program)
    kill "$program" 2>/dev/null
  done
}

# run_part NUMBER ATTEMPT PAYLOAD: runs the program for one part, whose payload is base64, and appends what became
# of it to the files done or failed.
run_part() {
  local code
  export PART=$1 ATTEMPT=$2
  echo "$PART" >part
  base64 -d <<<"$3" >payload
  timeout -k 5 "$LIMIT_S" "${PROGRAM[@]}" <payload >result 2>messages &
  echo $! >program
  until wait "$!"; code=$?; ! kill -0 "$!" 2>/dev/null; do :; done
  if [ "$code" != 0 ]; then
    tail -c 4000 messages | jq -Rsc --argjson part "$PART" --arg code "$code" \
      '{part: $part, error: (if $code == "124" then "Timeout" else "ExitCode" end), message: "exit code \($code): \(.)"}' >>failed
  elif iconv -f UTF-8 -t UTF-8 result >/dev/null 2>&1; then  # text, without the newline that most programs end with
    jq -Rsc --argjson part "$PART" '{part: $part, result: {text: rtrimstr("\n")}}' result >>done
  else
    base64 -w0 result | jq -Rsc --argjson part "$PART" '{part: $part, result: {base64: .}}' >>done
  fi
}

# run_parts: runs the parts of the file granted. Those that the report does not name go back to the server.
run_parts() {
  local number attempt payload
  cp granted held
  : >done; : >failed; rm -f unwanted; echo null >part
  read -r REQUEST LIMIT_S < <(jq -r '"\(.request) \((.timeout_ms // 0) / 1000)"' granted)  # 0: no limit
  export REQUEST
  beat & BEATS=$!
  while read -r number attempt payload <&3; do
    run_part "$number" "$attempt" "$payload"
    [ -z "$STOPPING" ] && [ ! -e unwanted ] && [ "$(stat -c %s done)" -lt 8000000 ] || break
  done 3< <(jq -r '.parts[] | "\(.number) \(.attempt // 1) \(
    if has("base64") then .base64 elif has("text") then .text | @base64 else .json | tojson | @base64 end)"' granted)
  echo null >part
}

# report: tells what became of the parts. Unless the worker stops, it asks for more.
report() {
  jq -c --slurpfile done done --slurpfile failed failed --argjson next "$([ -n "$STOPPING" ] && echo null || echo "$ASK")" \
    '{ticket, done: $done, failed: $failed} + if $next then {next: ($next + {wait_s: 1})} else {} end' granted >said
  call POST /v1/report granted said || : >granted  # the ticket is of no use any more: the server has the parts run again
  # Not before: the lease is to stand until the report is heard.
  kill "$BEATS" 2>/dev/null
  wait "$BEATS" 2>/dev/null
  [ "$STATUS" != 401 -a "$STATUS" != 403 ] || exit 1
}

has_ticket() { [ -s granted ] && [ -n "$(jq -r '.ticket // empty' granted)" ]; }

# slot: takes, runs and reports until the worker stops. It holds one ticket at a time.
slot() {
  local folder
  folder=$(mktemp -d) && cd "$folder" || exit 1
  trap 'rm -rf "$folder"' EXIT
  STOPPING=
  trap 'STOPPING=1; GIVE_UP=$(($(date +%s) + 20)); [ -z "$IS_TAKING" ] || { BROKEN_OFF=1; kill $CURL; } 2>/dev/null' TERM
  IS_TAKING=
  while [ -z "$STOPPING" ] && kill -0 "$$" 2>/dev/null; do
    echo "$ASK" >said
    IS_TAKING=1
    [ -n "$STOPPING" ] || call POST /v1/take granted said || { [ -n "$STOPPING" ] || exit 1; : >granted; }
    IS_TAKING=
    while has_ticket; do
      if [ -n "$STOPPING" ]; then  # these parts were not begun: others run them at once
        jq -c '{tickets: [.ticket]}' granted >said
        call POST /v1/leave granted said
        break
      fi
      run_parts
      report
    done
  done
}

PIDS=()
for ((i = 0; i < SLOTS; i++)); do slot & PIDS+=($!); done
trap 'kill "${PIDS[@]}" 2>/dev/null' TERM INT
CODE=0
for pid in "${PIDS[@]}"; do
  until wait "$pid"; code=$?; ! kill -0 "$pid" 2>/dev/null; do :; done
  [ "$code" = 0 ] || { CODE=$code; kill "${PIDS[@]}" 2>/dev/null; }
done
exit "$CODE"
