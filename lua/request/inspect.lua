-- inspect: read all counts and fields of a request, at one moment.
--
--   (reads only)
--
-- KEYS[1]  meta      HASH    everything that is known of the request
-- KEYS[2]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  results   HASH    part number, result
--
-- Returns  now (ms); left; leases; those whose holder may live; parts in retry; those of them that
--          were handed back; results; field, value, ... of meta
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(fields of meta)
-- Flags    no-writes

-- @include clock
-- @include version

-- A live holder is heard within this time after the deadline of its lease: the longest grace.
local LONGEST_GRACE_MS = 13000

local meta, left, leases, retry, results = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local fields = redis.call("HGETALL", meta)
if #fields == 0 then
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end
for i = 1, #fields, 2 do
  local newer = fields[i] == "protocol" and newer_than_known(fields[i + 1])
  if newer then
    return newer
  end
end

local now = now_ms()
return {
  now,
  tonumber(redis.call("GET", left)) or 0,
  redis.call("ZCARD", leases),
  redis.call("ZCOUNT", leases, now - LONGEST_GRACE_MS, "+inf"),
  redis.call("ZCARD", retry),
  -- Parts that were handed back: their scores are their numbers, which are far below any time.
  redis.call("ZCOUNT", retry, "-inf", now / 2),
  redis.call("HLEN", results),
  unpack(fields),
}
