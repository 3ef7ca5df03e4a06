-- set: change level, limit, rate, weight or ceiling of a request that runs.
--
--   (changes policy only)   request
--
-- KEYS[1]  meta      HASH    level, limit, rate, weight, ceiling, tokens believed out
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  retry     ZSET    part number, scored by when it may run again
-- KEYS[4+] next      meta of the next stage of a flow, for its window
--
-- ARGV[1]  level     0 to 99, or "" for as it is
-- ARGV[2]  limit     1 or more, or "" for as it is
-- ARGV[3]  rate_ms   time for each unit, 0 for no rate, or "" for as it is
-- ARGV[4]  weight    1 to 64, or "" for as it is
-- ARGV[5]  ceiling   number of the last part that may start, 0 for all, or "" for as it is
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

local k = { meta = KEYS[1], leases = KEYS[2], retry = KEYS[3], next = { unpack(KEYS, 4) } }
local level, limit, rate_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local weight, ceiling = tonumber(ARGV[4]), tonumber(ARGV[5])

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.next)
if refused_flow then
  return refused_flow
end
if not is_live(r) then
  return redis.error_reply("ENDED the request is " .. r.state)
end

if level and level ~= r.level then
  -- Tokens in the old list are written off: the worker that takes one drops it.
  put(r, "level", level)
  put(r, "out", 0)
end
if limit then
  put(r, "limit", limit)
  put(r, "eased", 0)
end
if weight then
  -- Tokens beyond a smaller weight are used up by the claims that come next.
  put(r, "weight", weight)
end
if ceiling then
  put(r, "ceiling", ceiling)
end
if rate_ms then
  put(r, "rate_ms", rate_ms)
  put(r, "rate_at_ms", 0)
end
note_room(k, r, k.next)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { r.state, mint, list_of(r), look }
