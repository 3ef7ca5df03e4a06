-- locate: tell where parts came from.
--
--   (reads only)
--
-- KEYS[1]  parts     STREAM  one entry per part
--
-- ARGV[1+] numbers   of the parts
--
-- Returns  about each part, "" where it has no entry
-- Errors   none
-- Cost     O(parts given, and their bytes)
-- Flags    no-writes

local parts = KEYS[1]
local numbers = { unpack(ARGV, 1) }

local abouts = {}
for i, number in ipairs(numbers) do
  local entry = redis.call("XRANGE", parts, number, number)[1]
  abouts[i] = entry and entry[2][1] or ""
end
return abouts
