-- pause: start no more parts; running parts go on to their end.
--
--   (sets the flag paused)  request
--
-- KEYS[1]  meta      HASH    state, paused
-- KEYS[2+] metas     of all stages of a flow
--
-- Returns  state
-- Errors   UNKNOWN   no such request
--          ENDED     the request does not run any more
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(1)
-- Flags    allow-oom

-- @include version
-- @include request
-- @include window

local meta, metas = KEYS[1], { unpack(KEYS, 2) }

local r, newer = load_request(meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(meta, r, metas)
if refused_flow then
  return refused_flow
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

put(r, "paused", 1)
save(meta, r)
for i = 1, r.protocol >= FLOW and #metas or 0 do
  redis.call("HSET", metas[i], "paused", 1)
end
return r.state
