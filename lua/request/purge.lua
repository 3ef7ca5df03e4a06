-- purge: forget a request that has ended, after its retention.
--
--   done, failed, cancelled -> (absent)     request
--
-- KEYS[1]  meta      HASH
-- KEYS[2]  parts     STREAM
-- KEYS[3]  left      STRING
-- KEYS[4]  leases    ZSET
-- KEYS[5]  retry     ZSET
-- KEYS[6]  holders   HASH
-- KEYS[7]  tries     HASH
-- KEYS[8]  partial   HASH
-- KEYS[9]  results   HASH
-- KEYS[10] failed    HASH
-- KEYS[11] gone      ZSET
--
-- ARGV[1]  force     1: do not wait for the end of its retention
--
-- Returns  0 when nothing of it remains, else when it may be purged (ms)
-- Errors   NOTENDED  the request still runs
--          NEWER     a later version of streamq made the request
-- Cost     O(1); the server frees the memory in the background
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request

local keys = {
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10],
  KEYS[11],
}
local force = ARGV[1]

local r, newer = load_request(keys[1])
if newer then
  return newer
end
if r and is_live(r) then
  return redis.error_reply("NOTENDED the request is " .. r.state)
end
if r and force ~= "1" then
  load_more(keys[1], r)
  if r.finished_ms + r.keep_ms > now_ms() then
    return r.finished_ms + r.keep_ms
  end
end

redis.call("UNLINK", unpack(keys))
return 0
