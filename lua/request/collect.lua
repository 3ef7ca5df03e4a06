-- collect: hand out results in input order; forget those that are safely written.
--
--   done -> (absent)        results that were committed
--
-- KEYS[1]  meta      HASH    state, counts, how far results are committed
-- KEYS[2]  results   HASH    part number, result
-- KEYS[3]  parts     STREAM  one entry per part
--
-- ARGV[1]  expected  what the caller believes to be committed
-- ARGV[2]  committed what is committed from now on; opaque; as expected for nothing new
-- ARGV[3]  next      number of the first part to hand out
-- ARGV[4]  most      parts to look at, at most
-- ARGV[5]  max_bytes stop handing out beyond this
-- ARGV[6+] fields    of results to forget
--
-- Returns  state; number to go on with; results left in the server; number, result, ...
-- Errors   UNKNOWN   no such request
--          FENCED    another collector has committed meanwhile
--          NEWER     a later version of streamq made the request
-- Cost     O(most + fields)
-- Flags    allow-oom

-- @include version
-- @include request

local k = { meta = KEYS[1], results = KEYS[2], parts = KEYS[3] }
local expected, committed = ARGV[1], ARGV[2]
local next_number, most, max_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local fields = { unpack(ARGV, 6) }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local stands = redis.call("HGET", k.meta, "committed") or ""
if committed ~= expected and stands ~= expected and stands ~= committed then
  return redis.error_reply("FENCED another collector has committed results meanwhile")
end

if committed ~= expected then
  redis.call("HSET", k.meta, "committed", committed)
  if #fields > 0 then
    redis.call("HDEL", k.results, unpack(fields))
  end
end

-- Returns whether a part has no result yet and may get one under its own number: it waits, runs, or
-- is to run again. A part that was given up, or redriven and finished since, is not pending any
-- more.
local function is_awaited(number)
  return is_live(r)
    and (tonumber(number) > r.delivered
      or #redis.call("XPENDING", k.parts, "w", number, number, 1) > 0)
end

local reply = { r.state, 0, 0 }
local last, bytes = math.min(r.total, next_number + most - 1), 0
while next_number <= last and bytes < max_bytes do
  local number = string.format("%d", next_number)
  local result = redis.call("HGET", k.results, number)
  if result then
    reply[#reply + 1] = number
    reply[#reply + 1] = result
    bytes = bytes + #result
  elseif is_awaited(number) then
    break
  end
  next_number = next_number + 1
end
reply[2], reply[3] = next_number, redis.call("HLEN", k.results)
return reply
