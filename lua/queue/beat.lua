-- beat: note that a worker lives and which requests it works on, or that it ends.
--
--   (changes the queue's indexes)
--
-- KEYS[1]  workers   ZSET  worker name, scored by its last heartbeat (ms)
-- KEYS[2]  worker    HASH  what this worker says of itself, with a TTL
-- KEYS[3]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[4]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[5]  watch     STRING  how many spans a second each worker may tell; has a TTL
--
-- ARGV[1]  name      of the worker
-- ARGV[2]  ttl_ms    how long it counts as alive without another beat; 0: it ends
-- ARGV[3]  details   what it says of itself; opaque
-- ARGV[4]  lease_ms  if it dies now, its requests need a look after this
-- ARGV[5+] requests  that it holds leases of
--
-- Returns  workers that were forgotten because they were silent for a day; how many spans a second
--          the worker is to tell, because somebody looks at the timeline
-- Errors   none
-- Cost     O(requests given * log requests)
-- Flags    allow-oom

-- @include clock

local workers, worker, due, open, watch = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local name, ttl_ms, details, lease_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local now = now_ms()
if ttl_ms == 0 then
  redis.call("ZREM", workers, name)
  redis.call("UNLINK", worker)
else
  redis.call("ZADD", workers, now, name)
  redis.call("HSET", worker, "details", details)
  redis.call("PEXPIRE", worker, ttl_ms)
end
-- A failover may have lost entries of the indexes. A worker that holds leases of a request
-- registers it again, with the score 0, since the time of its submission is not known. If the
-- request was purged meanwhile, the next look removes it.
for i = 5, #ARGV do
  redis.call("ZADD", open, "NX", 0, ARGV[i])
  redis.call("ZADD", due, "LT", now + lease_ms, ARGV[i])
end
return {
  redis.call("ZREMRANGEBYSCORE", workers, "-inf", now - 86400000),
  tonumber(redis.call("GET", watch)) or 0,
}
