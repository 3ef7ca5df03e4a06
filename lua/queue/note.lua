-- note: write down what somebody has changed, for those who ask later who did it.
--
--   (adds to the queue's log)
--
-- KEYS[1]  log       STREAM  what was changed of requests; about the last thousand
--
-- ARGV[1]  change    who changed what of which request; opaque
--
-- Returns  1
-- Errors   none
-- Cost     O(1)
-- Flags    allow-oom

local log = KEYS[1]
local change = ARGV[1]

redis.call("XADD", log, "MAXLEN", "~", 1000, "*", "change", change)
return 1
