-- fail: put a part off after an error, or give it up.
--
--   running -> retry        part, to run again later
--   running -> failed       part, after its last attempt
--   open -> failed          request, when more failed than it tolerates
--   open -> done            request, with its last part
--
-- KEYS[1]  meta      HASH    state, counts, policy, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  results   HASH    part number, result
-- KEYS[10] failed    HASH    part number, what was given up
-- KEYS[11] events    channel the end is published there
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3]  number    of the part
-- ARGV[4]  kind      retry, snooze (no attempt spent), hold (snooze the whole request), abandon
-- ARGV[5]  delay_ms  until it may run again
-- ARGV[6]  records_done    of the part, counted if it is given up
-- ARGV[7]  records_failed  of the part, counted if it is given up; -1: all it has
-- ARGV[8]  failure   what to keep if it is given up
-- ARGV[9]  result    what its good records yielded, kept if it is given up; "" for nothing
-- ARGV[10] partial   outcomes so far, for its next attempt; "" for none
--
-- Returns  retry, failed (the part), ended (the request has failed), lost, late, or the state of
--          a request done or cancelled; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(log parts in retry)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include ending
-- @include giveup

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], results = KEYS[9], failed = KEYS[10],
  events = KEYS[11],
}
local holder, call, number, kind = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local delay_ms, records_done, records_failed = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local failure, result, partial = ARGV[8], ARGV[9], ARGV[10]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused = refusal(k, r, holder, call)
if refused then
  return refused
end
if #redis.call("XPENDING", k.parts, "w", number, number, 1, holder) == 0 then
  return { "late", 0, list_of(r), 0 }
end

local now = now_ms()
load_more(k.meta, r)
redis.call("HSET", k.holders, holder, call)
redis.call("HDEL", k.holders, holder .. "#")
if partial ~= "" then
  redis.call("HSET", k.partial, number, partial)
end
local t = read_tries(redis.call("HGET", k.tries, number))
local word = "retry"
if kind == "retry" or kind == "abandon" then
  t.errors = t.errors + 1
end
if kind == "abandon" or t.errors > r.retries then
  word = "failed"
  if result ~= "" then
    redis.call("HSET", k.results, t.run > 0 and number .. "." .. t.run or number, result)
  end
  put(r, "records_done", r.records_done + records_done)
  t.records = records_failed >= 0 and records_failed or records_of(k.parts, number)
  give_up(k, r, now, number, t, failure)
else
  if kind == "hold" then
    put(r, "hold_ms", math.max(r.hold_ms, now + delay_ms))
  end
  -- Written for a snooze, too, although it spends no attempt: it shows that the part has run
  -- before.
  write_tries(k.tries, number, t)
  park(k, { number }, delay_ms > 0 and now + delay_ms or nil)
end
local mint, look = invite(k, r, now)
save(k.meta, r)
if not is_live(r) then
  word = r.state == "failed" and "ended" or r.state
end
return { word, mint, list_of(r), look }
