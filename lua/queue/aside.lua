-- aside: rename a key of the queue that has another type, so that scripts can use the name again.
--
--   (mends the queue's keys)
--
-- KEYS[1]  spoilt    any   the key in question
-- KEYS[2]  aside     any   its new name
-- KEYS[3]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[4]  open      ZSET  requests not finished, scored by submission (ms)
--
-- ARGV[1]  type      that it should be of
--
-- Returns  1; 0 if there was nothing to do
-- Errors   none
-- Cost     O(requests * log requests) for the indexes due and open
-- Flags    allow-oom

local spoilt, aside, due, open = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local type = ARGV[1]

-- Another caller may have renamed the key since this one looked, and the key may be good again.
local found = redis.call("TYPE", spoilt).ok
if found == type or found == "none" then
  return 0
end

redis.call("RENAME", spoilt, aside)
-- `due` and `open` hold the same requests, so each can be rebuilt from the other. A rebuilt `due`
-- has the times of submission as scores, so all requests are due. A rebuilt `open` has the score 0:
-- when the requests were submitted is not known any more.
if spoilt == due and redis.call("TYPE", open).ok == "zset" then
  redis.call("ZUNIONSTORE", due, 1, open)
elseif spoilt == open and redis.call("TYPE", due).ok == "zset" then
  redis.call("ZUNIONSTORE", open, 1, due, "WEIGHTS", 0)
end
return 1
