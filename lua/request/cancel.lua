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
-- KEYS[10+] stages   of a flow: groups, kids, and all keys of each later stage
--
-- Returns  parts that will not be finished
-- Errors   UNKNOWN   no such request
--          ENDED     the request is over already
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(1); the server frees the memory in the background
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include window

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], events = KEYS[9],
  stages = { unpack(KEYS, 10) },
}

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.stages)
if refused_flow then
  return refused_flow
end
load_more(k.meta, r)
local dropped = r.total - r.done - r.failed
if r.state == "cancelled" then
  return dropped
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

-- How many keys a later stage has in `stages`. The first is its meta, and the last what failed in
-- it: both stay until the request is purged.
local KEYS_OF_STAGE = 9

local now = now_ms()
local later = r.protocol >= FLOW and #k.stages or 0
for at = 3, later, KEYS_OF_STAGE do
  local counts = redis.call("HMGET", k.stages[at], "total", "done", "failed")
  dropped = dropped + (counts[1] or 0) - (counts[2] or 0) - (counts[3] or 0)
  redis.call("HSET", k.stages[at], "state", "cancelled", "finished_ms", now)
  redis.call("UNLINK", unpack(k.stages, at + 1, at + KEYS_OF_STAGE - 2))
end
if later > 0 then
  -- Not `kids`: they lead readers to the results that there are.
  redis.call("UNLINK", k.stages[1])
end
put(r, "state", "cancelled")
put(r, "finished_ms", now)
save(k.meta, r)
redis.call("UNLINK", k.parts, k.left, k.leases, k.retry, k.holders, k.tries, k.partial)
redis.call("SPUBLISH", k.events, "cancelled")
return dropped
