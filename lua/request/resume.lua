-- resume: start parts again after a pause.
--
--   (clears the flag paused)  request
--
-- KEYS[1]  meta      HASH    state, paused, tokens believed out
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  retry     ZSET    part number, scored by when it may run again
-- KEYS[4+] resuming  meta of the next stage of a flow, and of all its stages
--
-- Returns  state; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     the request does not run any more
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(log parts in retry)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include window

local k = { meta = KEYS[1], leases = KEYS[2], retry = KEYS[3], resuming = { unpack(KEYS, 4) } }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.resuming)
if refused_flow then
  return refused_flow
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

put(r, "paused", 0)
-- In all stages at once, if the request is a flow and all of them are there.
for i = 2, r.protocol >= FLOW and #k.resuming or 0 do
  redis.call("HSET", k.resuming[i], "paused", 0)
end
note_room(k, r, k.resuming)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { r.state, mint, list_of(r), look }
