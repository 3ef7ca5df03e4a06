-- redrive: run given-up parts again, under the same numbers.
--
--   failed -> retry             parts, at the front
--   done, failed -> open        request, if it had ended
--
-- KEYS[1]  meta      HASH    state, counts, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  tries     HASH    part number, what went wrong with it
-- KEYS[7]  failed    HASH    part number, what was given up
--
-- ARGV[1+] numbers   parts to run again
--
-- Returns  parts redriven; state; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     it was cancelled: its parts are gone
--          NEWER     a later version of streamq made the request
-- Cost     O(parts given)
-- Flags    none

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  tries = KEYS[6], failed = KEYS[7],
}

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
if r.state == "cancelled" then
  return redis.error_reply("ENDED the request was cancelled and its parts are gone")
end

load_more(k.meta, r)
local redriven = 0
for i = 1, #ARGV do
  local number = ARGV[i]
  if redis.call("HDEL", k.failed, number) == 1 then
    redis.call("XCLAIM", k.parts, "w", PARKED, 0, number, "FORCE", "JUSTID")
    redis.call("ZADD", k.retry, number, number)
    local t = read_tries(redis.call("HGET", k.tries, number))
    -- A part that has killed workers must not take others along.
    t.alone = t.crashes > 0 and 1 or 0
    t.errors, t.crashes, t.run = 0, 0, t.run + 1
    write_tries(k.tries, number, t)
    put(r, "records_failed", r.records_failed - t.records)
    redriven = redriven + 1
  end
end
put(r, "failed", r.failed - redriven)
local left = redis.call("INCRBY", k.left, redriven)
-- A request that failed before its end goes on even if no part was redriven.
if not is_live(r) and left > 0 then
  put(r, "state", redis.call("HGET", k.meta, "sealed") and "open" or "loading")
  put(r, "finished_ms", 0)
  put(r, "out", 0)
  put(r, "due_ms", 0)
  redis.call("HINCRBY", k.meta, "redrives", 1)
end
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { redriven, r.state, mint, list_of(r), look }
