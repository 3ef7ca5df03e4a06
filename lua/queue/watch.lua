-- watch: say that somebody looks at the timeline, so that workers tell what their slots did.
--
--   (nothing changes for requests)
--
-- KEYS[1]  watch     STRING  how many spans a second each worker may tell; has a TTL
--
-- ARGV[1]  most      that number
-- ARGV[2]  ttl_ms    for how long
--
-- Returns  1
-- Errors   none
-- Cost     O(1)
-- Flags    allow-oom

local watch = KEYS[1]
local most, ttl_ms = ARGV[1], ARGV[2]

redis.call("SET", watch, most, "PX", ttl_ms)
return 1
