-- collect: hand out results in input order; forget those that are safely written.
--
--   done -> (absent)        results that were committed
--
-- KEYS[1]  meta      HASH    state, counts, how far results are committed
-- KEYS[2]  results   HASH    part number, result
-- KEYS[3]  parts     STREAM  one entry per part
-- KEYS[4+] walk      kids of a flow
--
-- ARGV[1]  expected  what the caller believes to be committed
-- ARGV[2]  committed what is committed from now on; opaque; as expected for nothing new
-- ARGV[3]  next      number of the first part to hand out; of a flow also its child, as 17/3
-- ARGV[4]  most      parts to look at, at most
-- ARGV[5]  max_bytes stop handing out beyond this
-- ARGV[6+] fields    of results to forget
--
-- Returns  state; number to go on with; results left in the server; number, result, ...
-- Errors   UNKNOWN   no such request
--          FENCED    another collector has committed meanwhile
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a flow
-- Cost     O(most + fields)
-- Flags    allow-oom

-- @include version
-- @include request
-- @include window

local k = { meta = KEYS[1], results = KEYS[2], parts = KEYS[3],
  walk = { unpack(KEYS, 4) } }
local expected, committed = ARGV[1], ARGV[2]
local next_one, most, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local fields = { unpack(ARGV, 6) }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.walk)
if refused_flow then
  return refused_flow
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
local bytes = 0
local function give(field, result)
  reply[#reply + 1] = field
  reply[#reply + 1] = result
  bytes = bytes + #result
end

-- Goes through part numbers.
local function collect_plain(number)
  local last = math.min(r.total, number + most - 1)
  while number <= last and bytes < max_bytes do
    local field = string.format("%d", number)
    local result = redis.call("HGET", k.results, field)
    if result then
      give(field, result)
    elseif is_awaited(field) then
      break
    end
    number = number + 1
  end
  return number
end

-- Goes on from an origin to the next: a sister, a sister of its parent, ..., the next part.
local function move_on(path)
  while #path > 1 do
    local own = table.remove(path)
    local count = tonumber(redis.call("HGET", k.walk[1], table.concat(path, "/"))) or 0
    if own < count then
      path[#path + 1] = own + 1
      return
    end
  end
  path[1] = path[1] + 1
end

-- Goes through the items of a flow. An item that has ended has a result, or it has children; every
-- other one is awaited while the flow lives.
local function collect_flow(first)
  local path, looked = {}, 0
  for number in string.gmatch(first, "%d+") do
    path[#path + 1] = tonumber(number)
  end
  local last = redis.call("HGET", k.meta, "outputs") == "one" and 1 or r.total
  while path[1] <= last and looked < most and bytes < max_bytes do
    local field = table.concat(path, "/")
    local result = redis.call("HGET", k.results, field)
    local children = not result and tonumber(redis.call("HGET", k.walk[1], field))
    looked = looked + 1
    if result then
      give(field, result)
    elseif not children and is_live(r) then
      break
    end
    if children and children > 0 then
      path[#path + 1] = 1
    else
      move_on(path)
    end
  end
  -- Whoever reads on behind the last output is at the end, however many inputs there were.
  if path[1] > last then
    path = { r.total + 1 }
  end
  return table.concat(path, "/")
end

reply[2] = r.protocol >= FLOW and collect_flow(next_one) or collect_plain(tonumber(next_one))
reply[3] = redis.call("HLEN", k.results)
return reply
