-- show: tell what the slots of a worker did lately, while somebody looks at the timeline.
--
--   (nothing changes for requests)
--
-- KEYS[1]  spans     STREAM  what slots did; the last minute at most
--
-- ARGV[1]  told      spans of one worker; opaque
--
-- Returns  1
-- Errors   none
-- Cost     O(1)
-- Flags    allow-oom

local spans = KEYS[1]
local told = ARGV[1]

-- Workers stop telling when nobody looks any more, and what they told goes a minute later.
redis.call("XADD", spans, "MAXLEN", "~", 2000, "*", "told", told)
redis.call("PEXPIRE", spans, 60000)
return 1
