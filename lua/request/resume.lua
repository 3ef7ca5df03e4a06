-- resume: start parts again after a pause.
--
--   (clears the flag paused)  request
--
-- KEYS[1]  meta      HASH    state, paused, tokens believed out
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  retry     ZSET    part number, scored by when it may run again
--
-- Returns  state; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     the request does not run any more
--          NEWER     a later version of streamq made the request
-- Cost     O(log parts in retry)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens

local k = { meta = KEYS[1], leases = KEYS[2], retry = KEYS[3] }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

put(r, "paused", 0)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { r.state, mint, list_of(r), look }
