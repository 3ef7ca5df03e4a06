-- tick: take the requests that are due for a look or a purge.
--
--   (lends each due request to the caller, and moves its next look to later when it was looked at)
--
-- KEYS[1]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[2]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[3]  closed    ZSET  finished requests, scored by when they may be purged (ms)
--
-- ARGV[1]  limit     requests to take of each kind, at most
-- ARGV[2]  every_ms  each open request is looked at about so often; more seldom when they
--                    are so many that the looks would come faster than one in 10 ms
-- ARGV[3]  lent      until when (ms) the caller had the requests of its last tick, or 0
-- ARGV[4+] looked    those of them that it has looked at
--
-- Returns  now (ms); ms until the next is due; how many are due; request id, its score in
--          open, ...; then request id, its score in closed, ... of those to purge
-- Errors   none
-- Cost     O((limit + looked) * log requests)
-- Flags    allow-oom

-- @include clock

local due, open, closed = KEYS[1], KEYS[2], KEYS[3]
local limit, every_ms, lent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local looked = { unpack(ARGV, 4) }

local now = now_ms()
local reply = { now, every_ms, 0 }
local next_look = now + math.max(every_ms, 10 * redis.call("ZCARD", open))
-- A request that was registered for another time since it was lent keeps that time.
for _, request_id in ipairs(looked) do
  if tonumber(redis.call("ZSCORE", due, request_id)) == lent then
    redis.call("ZADD", due, math.max(next_look, lent), request_id)
  end
end
for _, request_id in ipairs(redis.call("ZRANGEBYSCORE", due, "-inf", now, "LIMIT", 0, limit)) do
  local score = redis.call("ZSCORE", open, request_id)
  if not score and not redis.call("ZSCORE", closed, request_id) then
    -- The index was lost, or the request was; the look will tell. The time of submission is not
    -- known.
    redis.call("ZADD", open, 0, request_id)
    score = "0"
  end
  if score then
    -- If the caller dies, or this answer is lost, the request is due again after every_ms.
    redis.call("ZADD", due, now + every_ms, request_id)
    reply[3] = reply[3] + 1
    reply[#reply + 1] = request_id
    reply[#reply + 1] = score
  else
    redis.call("ZREM", due, request_id)
  end
end
local first = redis.call("ZRANGE", due, 0, 0, "WITHSCORES")
if first[2] then
  reply[2] = math.max(0, math.min(every_ms, tonumber(first[2]) - now))
end
for _, value in ipairs(redis.call("ZRANGEBYSCORE", closed, "-inf", now, "WITHSCORES", "LIMIT", 0, limit)) do
  reply[#reply + 1] = value
end
return reply
