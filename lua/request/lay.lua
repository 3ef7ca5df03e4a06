-- lay: create the later stages of a request, all of them.
--
--   (absent) -> open        stages 2 and on, of a request that is loading
--
-- KEYS[1]  meta      HASH    everything that is known of the request
-- KEYS[2+] stages    groups, kids, and all keys of each later stage
--
-- ARGV[1]  digest    of the submission, as open was given it
-- ARGV[2]  counts    how many of the fields are of the first stage, of the second, ...
-- ARGV[3+] fields    of each stage in turn: field, value, field, value
--
-- Returns  1 when laid now, 0 when found
-- Errors   UNKNOWN   no such request
--          EXISTS    the id is taken by another submission
--          NEWER     a later version of streamq made the request
-- Cost     O(fields)
-- Flags    none

-- @include version

-- How many keys a later stage has in `stages`; the first two are its meta and its parts.
local KEYS_OF_STAGE = 9

local meta, stages = KEYS[1], { unpack(KEYS, 2) }
local digest, counts, fields = ARGV[1], ARGV[2], { unpack(ARGV, 3) }

local found = redis.call("HMGET", meta, "digest", "protocol", "hold_ms", "laid", "created_ms")
if not found[1] then
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end
local newer = newer_than_known(found[2])
if newer then
  return newer
end
if found[1] ~= digest then
  return redis.error_reply("EXISTS the id is taken by another submission")
end
if found[4] then
  return 0
end

-- A request of the same id may have been purged before its stages were.
redis.call("UNLINK", unpack(stages))
local first, stage = 1, 0
for count in string.gmatch(counts, "%d+") do
  local last, at = first + count - 1, 2 + KEYS_OF_STAGE * (stage - 1)
  local own = stage == 0 and meta or stages[at + 1]
  if stage > 0 then
    redis.call("XGROUP", "CREATE", stages[at + 2], "w", 0, "MKSTREAM")
    redis.call("HSET", own, "state", "open", "total", 0, "created_ms", found[5],
      "hold_ms", found[3] or 0, "sealed", 1)
  end
  redis.call("HSET", own, unpack(fields, first, last))
  redis.call("HSET", own, "protocol", FLOW)
  first, stage = last + 1, stage + 1
end
redis.call("HSET", meta, "laid", 1)
return 1
