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
-- KEYS[12] pace      STRING
-- KEYS[13] keys      HASH
-- KEYS[14+] whole    all keys of all stages of a flow
--
-- ARGV[1]  force     1: do not wait for the end of its retention; asked: the caller has seen that
--                    the request whose callback this one is owes nothing
--
-- Returns  0 when nothing of it remains, else when it may be purged (ms); -1 when it is a callback
--          and its parent must be asked first
-- Errors   NOTENDED  the request still runs, or its callbacks are not started; or it is a callback,
--                    and ended less than ten minutes ago
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(1); the server frees the memory in the background
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include window

local keys = {
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10],
  KEYS[11], KEYS[12], KEYS[13],
}
local whole = { unpack(KEYS, 14) }
local force = ARGV[1]

local r, newer = load_request(keys[1])
if newer then
  return newer
end
local refused_flow = r and untold(keys[1], r, whole)
if refused_flow then
  return refused_flow
end
-- What is owed, and how long it is kept, stands with the first stage: no other goes before it.
local meta = keys[1]
if r and r.protocol >= FLOW and whole[1] ~= meta then
  local first = load_request(whole[1])
  if first then
    r, meta = first, whole[1]
  end
end
if r and is_live(r) then
  return redis.error_reply("NOTENDED the request is " .. r.state)
end
if r then
  load_more(meta, r)
  local now, kept = now_ms(), r.finished_ms + math.max(r.keep_ms, r.outlive_ms)
  if force == "1" and r.finished_ms + r.outlive_ms > now then
    return redis.error_reply("NOTENDED the request is a callback, and is kept for "
      .. r.outlive_ms / 60000 .. " minutes after its end, so that nobody starts it again")
  end
  if force ~= "1" and is_owed(r) then
    return redis.error_reply("NOTENDED the callbacks of the request are not started yet")
  end
  if force ~= "1" and kept > now then
    return kept
  end
  if force == "0" and r.outlive_ms > 0 then
    return -1
  end
end

redis.call("UNLINK", unpack(keys))
if r and r.protocol >= FLOW then
  redis.call("UNLINK", unpack(whole))
end
return 0
