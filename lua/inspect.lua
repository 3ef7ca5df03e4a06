-- inspect: read everything that is counted of a request, at one moment.
--
--   (reads only)
--
-- KEYS[1]  meta      HASH    everything that is known of the request
-- KEYS[2]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  results   HASH    part number, result
--
-- Returns  now (ms); left; leases; parts in retry; results; field, value, ... of meta
-- Errors   UNKNOWN   no such request
-- Cost     O(fields of meta)
-- Flags    no-writes

-- @include clock

local meta, left, leases, retry, results = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local fields = redis.call("HGETALL", meta)
if #fields == 0 then
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end

return {
  now_ms(),
  tonumber(redis.call("GET", left)) or 0,
  redis.call("ZCARD", leases),
  redis.call("ZCARD", retry),
  redis.call("HLEN", results),
  unpack(fields),
}
