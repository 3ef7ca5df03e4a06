-- settle: note that the callbacks of a request's end are started.
--
--   (changes what the request owes)   request that has ended
--
-- KEYS[1]  meta      HASH    state, what it owes
--
-- ARGV[1]  created   when the request was created (ms) whose end it was
-- ARGV[2]  run       how often the request had been redriven by then
--
-- Returns  1; 0 when it owes nothing for that end: it was settled before, or redriven since
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(1)
-- Flags    allow-oom

-- @include version
-- @include request

local meta = KEYS[1]
local created, run = tonumber(ARGV[1]), tonumber(ARGV[2])

local r, newer = load_request(meta)
if not r then
  return newer or unknown()
end
load_more(meta, r)
if not is_owed(r) or r.created_ms ~= created or r.redrives ~= run then
  return 0
end
redis.call("HSET", meta, "settled", run + 1)
return 1
