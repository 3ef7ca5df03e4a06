-- renew: move the deadlines of leases that stand, and say which do not.
--
--   running -> running      parts, later deadline
--
-- KEYS[1]  meta      HASH    state, the longest lease
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  holders   HASH    call number and running part of each lease
--
-- ARGV[1]  lease_ms  how long the leases stand from now without another renewal
-- ARGV[2+] holders   holder, number of the part it runs or "", holder, number, ...
--
-- Returns  state; 1 while paused; for each holder 1 while its lease stands, else 0
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(holders given)
-- Flags    allow-oom

-- @include clock
-- @include version

local meta, leases, holders = KEYS[1], KEYS[2], KEYS[3]
local lease_ms = tonumber(ARGV[1])

local found = redis.call("HMGET", meta, "state", "paused", "protocol", "lease_ms")
if not found[1] then
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end
local newer = newer_than_known(found[3])
if newer then
  return newer
end

-- The grace of a request follows from its longest lease (lib/suspicion.lua). A gateway claims with a
-- short one, and renews it to its whole length when its worker has the parts. Such a worker beats
-- every 3 s at the least, which is a quarter of 12 s: it needs the grace of a lease of 12 s, and
-- with more its parts would run again too late if it died.
local MOST_NOTED_MS = 12000
local longest = tonumber(found[4]) or 0
local deadline = now_ms() + lease_ms
local reply = { found[1], tonumber(found[2]) or 0 }
for i = 2, #ARGV, 2 do
  local holder, running = ARGV[i], ARGV[i + 1]
  local stands = redis.call("ZSCORE", leases, holder) and 1 or 0
  if stands == 1 then
    redis.call("ZADD", leases, "XX", deadline, holder)
    redis.call("HSET", holders, holder .. "#", running)
    if math.min(lease_ms, MOST_NOTED_MS) > longest then
      longest = math.min(lease_ms, MOST_NOTED_MS)
      redis.call("HSET", meta, "lease_ms", longest)
    end
  end
  reply[#reply + 1] = stands
end
return reply
