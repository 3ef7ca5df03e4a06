-- index: remember which parts have which keys; or forget parts that a load told of and never added.
--
--   (changes no state)
--
-- KEYS[1]  meta      HASH    to see that the request is there, and how many parts it has
-- KEYS[2]  keys      HASH    key -> numbers of the parts that have it, joined by spaces
--
-- ARGV[1]  most      numbers that are kept of a key, at most; 0: forget
-- ARGV[2+] pairs     number of a part, its key, number, key, ...; to forget: where to start
--
-- Returns  how many parts have a key that came before; or where to go on, 0 at the end
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(pairs), or O(1,000) keys
-- Flags    none

-- @include version
-- @include request

local meta, keys = KEYS[1], KEYS[2]
local most, pairs_given = tonumber(ARGV[1]), { unpack(ARGV, 2) }

local r, newer = load_request(meta)
if not r then
  return newer or unknown()
end

if most == 0 then
  local found = redis.call("HSCAN", keys, pairs_given[1], "COUNT", 1000)
  for i = 1, #found[2], 2 do
    local key, before, kept = found[2][i], found[2][i + 1], {}
    for number in string.gmatch(before, "%d+") do
      kept[#kept + 1] = tonumber(number) <= r.total and number or nil
    end
    local after = table.concat(kept, " ")
    if after == "" then
      redis.call("HDEL", keys, key)
    elseif after ~= before then
      redis.call("HSET", keys, key, after)
    end
  end
  return found[1]
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
