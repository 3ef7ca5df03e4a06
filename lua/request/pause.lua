-- pause: start no more parts; running parts go on to their end.
--
--   (sets the flag paused)  request
--
-- KEYS[1]  meta      HASH    state, paused
--
-- Returns  state
-- Errors   UNKNOWN   no such request
--          ENDED     the request does not run any more
--          NEWER     a later version of streamq made the request
-- Cost     O(1)
-- Flags    allow-oom

-- @include version
-- @include request

local meta = KEYS[1]

local r, newer = load_request(meta)
if not r then
  return newer or unknown()
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

put(r, "paused", 1)
save(meta, r)
return r.state
