-- fail: put a part off after an error, or give it up.
--
--   running -> retry        part, to run again later
--   running -> failed       part, after its last attempt
--   open -> failed, done    request, when more failed than it tolerates; with its last part
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
-- KEYS[12+] flow     of the other stages, as lib/flow.lua reads them
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3]  number    of the part
-- ARGV[4]  kind      retry, late, snooze (spends no attempt), hold (snooze the request), abandon
-- ARGV[5]  delay_ms  until it may run again
-- ARGV[6]  records_done    of the part, counted if it is given up
-- ARGV[7]  records_failed  likewise; -1: all it has
-- ARGV[8]  failure   what to keep if it is given up
-- ARGV[9]  result    what its good records yielded, kept if it is given up; "" for nothing
-- ARGV[10] partial   outcomes so far, for its next attempt; "" for none, "-" to forget the stored
-- ARGV[11] late      which of its records, from 1, took too long; "" for another kind
--
-- Returns  retry, failed (the part), ended (the request has failed), lost, late, or the state of
--          a request done or cancelled; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
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
-- @include marks
-- @include window
-- @include flow
-- @include tree
-- @include handover

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], results = KEYS[9], failed = KEYS[10],
  events = KEYS[11], flow = { unpack(KEYS, 12) },
}
local holder, call, number, kind = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local delay_ms, records_done, records_failed = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local failure, result, partial, late = ARGV[8], ARGV[9], ARGV[10], ARGV[11]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local now = now_ms()
local f, refused_flow = enter_flow(k, r, now)
local refused = refused_flow or refusal(k, r, holder, call)
if refused then
  return refused
end
if #redis.call("XPENDING", k.parts, "w", number, number, 1, holder) == 0 then
  return { "late", 0, list_of(r), 0 }
end

load_more(k.meta, r)
local before = r.total - r.done - r.failed
note_call(k, r, holder, call)
redis.call("HDEL", k.holders, holder .. "#")
if partial == "-" then
  redis.call("HDEL", k.partial, number)
elseif partial ~= "" then
  redis.call("HSET", k.partial, number, partial)
end
local t = read_tries(redis.call("HGET", k.tries, number))
local word = "retry"
if kind == "retry" or kind == "late" or kind == "abandon" then
  t.errors = t.errors + 1
end
-- Where one record of several took too long, the part runs once more after its last attempt: its
-- worker then gives up that record, and runs the others. So a part may have one more attempt for
-- each of its records.
local retries = r.retries
if kind == "late" then
  local records = records_of(k.parts, number)
  if records > 1 then
    retries = retries + records
    delay_ms = t.errors > r.retries and 0 or delay_ms
  end
end
set_mark(k.partial, number, kind == "late" and string.format("late %d %d %s", t.run, t.errors, late) or "")
if kind == "abandon" or t.errors > retries then
  word = "failed"
  if f then
    f.result = result ~= "" and { payload = result, records = records_done } or nil
  elseif result ~= "" then
    redis.call("HSET", k.results, t.run > 0 and number .. "." .. t.run or number, result)
  end
  put(r, "records_done", r.records_done + records_done)
  t.records = records_failed >= 0 and records_failed or records_of(k.parts, number)
  give_up(k, r, now, number, t, failure)
else
  if kind == "hold" then
    -- While the request is held nothing starts, so this part was running when the hold began. The
    -- hold lasts as long as the longest that was asked for, from its beginning on.
    local begun = tonumber(redis.call("HGET", k.meta, "hold_from_ms")) or now
    if r.hold_ms <= now or begun > now then
      begun = now
      put(r, "hold_from_ms", now)
      ease(k, r, now, now + delay_ms)
    end
    put(r, "hold_ms", math.max(r.hold_ms, begun + delay_ms))
  end
  -- Written for a snooze, too, although it spends no attempt: it shows that the part has run
  -- before.
  write_tries(k.tries, number, t)
  park(k, { number }, delay_ms > 0 and now + delay_ms or nil)
end
note_room_behind(f)
local mint, look = invite(k, r, now)
local others = f and leave_flow(f, before)
save(k.meta, r)
if not is_live(r) then
  word = r.state == "failed" and "ended" or r.state
end
return { word, mint, list_of(r), look, others or nil }
