-- open: create a request, or find the one of the same submission.
--
--   (absent) -> loading     request
--
-- KEYS[1]  meta      HASH    everything that is known of the request
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
--
-- ARGV[1]  digest    of the submission: equal means the same, sent again
-- ARGV[2]  delay_ms  nothing starts before this much time has passed
-- ARGV[3+] fields    the rest of meta, as field, value, field, value. If the first is
--                    deadline_in_ms, the deadline is so long from now
--
-- Returns  1 when created, 0 when found; state; parts so far; load cursor
-- Errors   EXISTS    the id is taken by another submission
--          NEWER     a later version of streamq made the request
-- Cost     O(1)
-- Flags    none

-- @include clock
-- @include version

local meta, parts, left = KEYS[1], KEYS[2], KEYS[3]
local digest, delay_ms = ARGV[1], tonumber(ARGV[2])

local found = redis.call("HMGET", meta, "digest", "state", "total", "cursor", "protocol")
local newer = found[1] and newer_than_known(found[5])
if newer then
  return newer
end
if found[1] and found[1] ~= digest then
  return redis.error_reply("EXISTS the id is taken by another submission")
end
if found[1] then
  return { 0, found[2], tonumber(found[3]), found[4] }
end

local now = now_ms()
redis.call("XGROUP", "CREATE", parts, "w", 0, "MKSTREAM")
redis.call("SET", left, 1)
redis.call("HSET", meta, "protocol", PLAIN, unpack(ARGV, 3))
redis.call("HSET", meta, "digest", digest, "state", "loading", "total", 0, "cursor", "",
  "created_ms", now, "hold_ms", delay_ms > 0 and now + delay_ms or 0)
local first, value = unpack(ARGV, 3, 4)
if first == "deadline_in_ms" then
  redis.call("HSET", meta, "deadline_ms", now + tonumber(value))
end
return { 1, "loading", 0, "" }
