-- submit: create a request with all its parts, in one step.
--
--   (absent) -> open        request
--   (absent) -> waiting     parts
--
-- KEYS[1]  meta      HASH    everything that is known of the request
-- KEYS[2]  parts     STREAM  one entry per part, its id is the part's number
-- KEYS[3]  left      STRING  parts not finished
--
-- ARGV[1]  digest    of the submission: equal means the same, sent again
-- ARGV[2]  cursor    where the load stands at its end; opaque
-- ARGV[3]  delay_ms  nothing starts before this much time has passed
-- ARGV[4]  total     parts, of one record each
-- ARGV[5+] rest      the rest of meta, as field, value, ...; then payload, about, payload, about.
--                    If the first field is not_after, the call is refused after that moment (ms);
--                    if it is deadline_in_ms, the deadline is so long from now
--
-- Returns  tokens to push; when to look again
-- Errors   EXISTS    the id is taken by another submission
--          LATE      the call was made too long ago
--          NEWER     a later version of streamq made the request
-- Cost     O(parts)
-- Flags    none

-- @include clock
-- @include version

local meta, parts, left = KEYS[1], KEYS[2], KEYS[3]
local digest, cursor, delay_ms, total = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
-- Index of the last argument that belongs to meta.
local fields = #ARGV - 2 * total

local found = redis.call("HMGET", meta, "digest", "cursor", "protocol")
local newer = found[1] and newer_than_known(found[3])
if newer then
  return newer
end
if found[1] and (found[1] ~= digest or found[2] ~= cursor) then
  return redis.error_reply("EXISTS the id is taken by another submission")
end
if found[1] then
  return { 0, 0 }
end

local now = now_ms()
local first, value = unpack(ARGV, 5, 6)
if first == "not_after" and now > tonumber(value) then
  return redis.error_reply("LATE the submission was made " .. now - tonumber(value)
    .. " ms too long ago, and might be the second")
end
local hold_ms = delay_ms > 0 and now + delay_ms or 0
-- One token is enough: the claim made with it asks for more.
local out = delay_ms > 0 and 0 or 1
local bytes = 0
redis.call("XGROUP", "CREATE", parts, "w", 0, "MKSTREAM")
for number = 1, total do
  local payload, about = ARGV[fields + 2 * number - 1], ARGV[fields + 2 * number]
  redis.call("XADD", parts, number, about, payload)
  bytes = bytes + #payload
end
redis.call("SET", left, total)
redis.call("HSET", meta, "digest", digest, "state", "open", "sealed", 1, "total", total,
  "records", total, "bytes", bytes, "cursor", cursor, "created_ms", now, "hold_ms", hold_ms,
  "out", out, "protocol", PLAIN, unpack(ARGV, 5, fields))
if first == "deadline_in_ms" then
  redis.call("HSET", meta, "deadline_ms", now + tonumber(value))
end
return { out, hold_ms }
