-- cancel: end a request now, at the same cost however many parts it still has.
--
--   loading, open -> cancelled     request
--
-- KEYS[1]  meta      HASH    state
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  events    channel the end is published there
--
-- Returns  parts that will not be finished
-- Errors   UNKNOWN   no such request
--          ENDED     the request is over already
--          NEWER     a later version of streamq made the request
-- Cost     O(1); the server frees the memory in the background
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], events = KEYS[9],
}

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
load_more(k.meta, r)
local dropped = r.total - r.done - r.failed
if r.state == "cancelled" then
  return dropped
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

put(r, "state", "cancelled")
put(r, "finished_ms", now_ms())
save(k.meta, r)
redis.call("UNLINK", k.parts, k.left, k.leases, k.retry, k.holders, k.tries, k.partial)
redis.call("SPUBLISH", k.events, "cancelled")
return dropped
