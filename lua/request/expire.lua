-- expire: end a request that is past its deadline.
--
--   loading, open -> failed     request
--
-- KEYS[1]  meta      HASH    state, deadline
-- KEYS[2]  events    channel the end is published there
-- KEYS[3+] metas     of all stages of a flow
--
-- Returns  state
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(1)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include window
-- @include ending

local k = { meta = KEYS[1], events = KEYS[2], metas = { unpack(KEYS, 3) } }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.metas)
if refused_flow then
  return refused_flow
end
local now = now_ms()
local deadline = tonumber(redis.call("HGET", k.meta, "deadline_ms"))
-- A moment later the deadline may have been moved, or the request have ended.
if is_live(r) and deadline and deadline <= now then
  for i = 1, r.protocol >= FLOW and #k.metas or 0 do
    redis.call("HSET", k.metas[i], "state", "failed", "finished_ms", now)
  end
  put(r, "reason", "deadline")
  end_request(k, r, now, "failed")
end
return r.state
