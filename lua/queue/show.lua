-- show: tell what the slots of a worker did lately, while somebody looks at the timeline.
--
--   (nothing changes for requests)
--
-- KEYS[1]  spans     STREAM  what slots did; of about the last minute
--
-- ARGV[1]  told      spans of one worker; opaque
--
-- Returns  1
-- Errors   none
-- Cost     O(1)
-- Flags    allow-oom

-- @include clock

local spans = KEYS[1]
local told = ARGV[1]

-- Workers stop telling when nobody looks any more, and what they told goes a minute later.
local LAST_MS = 60000
local oldest = string.format("%.0f", now_ms() - LAST_MS)
redis.call("XADD", spans, "MINID", "~", oldest, "*", "told", told)
redis.call("PEXPIRE", spans, LAST_MS)
return 1
