-- index: remember which parts have which keys, so that they are found by them.
--
--   (changes no state)
--
-- KEYS[1]  meta      HASH    only to see that the request is there
-- KEYS[2]  keys      HASH    key -> numbers of the parts that have it, joined by spaces
--
-- ARGV[1]  most      numbers that are kept of a key, at most
-- ARGV[2+] pairs     number of a part, its key, number, key, ...
--
-- Returns  how many parts have a key that came before
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(pairs)
-- Flags    none

-- @include version
-- @include request

local meta, keys = KEYS[1], KEYS[2]
local most, pairs_given = tonumber(ARGV[1]), { unpack(ARGV, 2) }

local r, newer = load_request(meta)
if not r then
  return newer or unknown()
end

local again = 0
for i = 1, #pairs_given, 2 do
  local number, key = pairs_given[i], pairs_given[i + 1]
  local before = redis.call("HGET", keys, key)
  if not before then
    redis.call("HSET", keys, key, number)
  elseif not string.find(" " .. before .. " ", " " .. number .. " ", 1, true) then
    again = again + 1
    local _, spaces = string.gsub(before, " ", " ")
    if spaces + 1 < most then
      redis.call("HSET", keys, key, before .. " " .. number)
    end
  end
end
return again
