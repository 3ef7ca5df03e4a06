-- close: move an ended request from open to closed, or remove a purged one from all indexes.
--
--   open -> closed -> (absent)     in the queue's indexes
--
-- KEYS[1]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[2]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[3]  closed    ZSET  finished requests, scored by when they may be purged (ms)
--
-- ARGV[1]  request_id
-- ARGV[2]  score     its score in open, read before it was seen to have ended
-- ARGV[3]  purge_at  when it may be purged (ms); 0: it is purged
--
-- Returns  1; 0 when the request was registered anew meanwhile, was not in open, or was in closed
--          already (a worker that still holds it puts it back into open with its heartbeat)
-- Errors   none
-- Cost     O(log requests)
-- Flags    allow-oom

local due, open, closed = KEYS[1], KEYS[2], KEYS[3]
local request_id, score, purge_at = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local stands = tonumber(redis.call("ZSCORE", open, request_id))
if stands and stands ~= score then
  return 0
end

local was_closed = redis.call("ZSCORE", closed, request_id)
local was_open = redis.call("ZREM", open, request_id)
redis.call("ZREM", due, request_id)
if purge_at > 0 then
  redis.call("ZADD", closed, purge_at, request_id)
else
  redis.call("ZREM", closed, request_id)
end
return was_closed and 0 or was_open
