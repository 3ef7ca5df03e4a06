# Calls of a gateway, for worker.sh and load.sh. A call that gets no answer is made again, word for word: to
# the gateway it is the same call, so nothing is lost and nothing is counted twice.
GATEWAY=${STREAMQ_GATEWAY:-http://127.0.0.1:8470} GATEWAY=${GATEWAY%/}
QUEUE=${STREAMQ_QUEUE:-default}
LONGEST=75  # seconds that a call may take; the gateway has one wait for up to 50
GIVE_UP=  # a moment (seconds since 1970) after which no call is repeated any more
BROKEN_OFF=  # set: the call that waits now is not repeated
CURL=  # the process of the call that waits now
STATUS=

# The key is not on a command line, where others could read it.
key() { [ -z "${STREAMQ_KEY:-}" ] || printf 'header = "Authorization: Bearer %s"\n' "$STREAMQ_KEY"; }

# call METHOD PATH ANSWER [BODY]: writes the answer to the file ANSWER. Returns 0, or 1 for a refusal,
# which it prints and whose status is in $STATUS.
call() {
  local answer=$3 body=${4:-} tries=0 after pause
  while [ -z "$BROKEN_OFF" ]; do
    # In the background, because bash runs traps while it waits, and not before a program has ended.
    curl -sS -K <(key) -X "$1" ${body:+--data-binary "@$body"} -H 'Content-Type: application/json' -m "$LONGEST" \
      -D "$answer.headers" -o "$answer" -w '%{http_code}' "$GATEWAY$2" >"$answer.status" 2>"$answer.error" &
    CURL=$!
    until wait "$CURL"; do kill -0 "$CURL" 2>/dev/null || break; done
    CURL=
    STATUS=$(<"$answer.status")
    case $STATUS in
      204) : >"$answer"; return 0 ;;
      2??) [ -s "$answer.error" ] || return 0 ;;  # else the connection broke in the middle
      000 | "" | 408 | 429 | 502 | 503 | 504 | 507) ;;
      *) echo "$1 $2: $STATUS $(jq -r '"\(.code): \(.detail)"' "$answer" 2>/dev/null)" >&2; return 1 ;;
    esac
    [ -z "$GIVE_UP" ] || [ "$(date +%s)" -lt "$GIVE_UP" ] || break
    after=$(sed -n 's/^retry-after: *\([0-9]*\).*/\1/Ip' "$answer.headers" 2>/dev/null) || :
    pause=$((tries < 5 ? 200 * 2 ** tries : 5000))
    # After an outage a worker that holds parts has to be heard within about a lease.
    [ "$2" != /v1/report ] || pause=$((pause < 1500 ? pause : 1500))
    [ "${after:-0}" -le $((pause / 1000)) ] || pause=$((after * 1000))
    # A part of it is random, so that a fleet does not come back all at once.
    sleep "$(printf '%d.%03d' $((pause / 1000)) $((pause % 1000 * 3 / 4 + RANDOM % 250)))" & wait $! || :
    tries=$((tries + 1))
  done
  STATUS=000
  return 1
}
