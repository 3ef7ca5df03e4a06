-- What a lease holds: whether a call under it may be executed, and how it ends.
-- A part in `retry` stays pending in the group under this consumer, which never has a lease.
local PARKED = "-"
-- Largest number of parts that are handed out, or read, at once.
local MOST_HELD = 1000

local function number_of(id)
  return string.match(id, "^%d+")
end

-- Returns the numbers of the parts pending under a holder: the first 1,000, if there are more.
local function held(parts, holder)
  local numbers = {}
  for i, entry in ipairs(redis.call("XPENDING", parts, "w", "-", "+", MOST_HELD, holder)) do
    numbers[i] = number_of(entry[1])
  end
  return numbers
end

-- Parks parts until a moment. Without one they go to the front, in input order: the score is then
-- the part's number, which is far below any time, so the part is due before all that were put off.
local function park(k, numbers, due)
  if #numbers == 0 then
    return
  end
  local claimed, scored = {}, {}
  for i, number in ipairs(numbers) do
    claimed[i] = number
    scored[2 * i - 1] = due or number
    scored[2 * i] = number
  end
  claimed[#claimed + 1] = "JUSTID"
  redis.call("XCLAIM", k.parts, "w", PARKED, 0, unpack(claimed))
  redis.call("ZADD", k.retry, unpack(scored))
end

-- Ends a lease. First all parts pending under it go to the front: deleting the consumer would lose
-- any that are left. Returns the numbers of the parts.
local function end_lease(k, holder)
  local numbers = {}
  repeat
    local some = held(k.parts, holder)
    park(k, some)
    for _, number in ipairs(some) do
      numbers[#numbers + 1] = number
    end
  until #some < MOST_HELD
  redis.call("ZREM", k.leases, holder)
  redis.call("HDEL", k.holders, holder, holder .. "#")
  redis.call("XGROUP", "DELCONSUMER", k.parts, "w", holder)
  return numbers
end

-- Returns whether calls of the lease are missing before this one: the slot has forgotten them, in a
-- failover. A worker numbers its calls by the thousand, and its pool speaks with the numbers that
-- follow the last one answered; a gateway uses some of each thousand (rule F7).
local function is_gap(holder, call, stored)
  local steps = math.floor(call / 1000) - math.floor(stored / 1000)
  local is_own = call % 1000 == 0 or string.sub(holder, 1, 1) == "g"
  return steps > (is_own and 1 or 0)
end

-- Notes the number of a call that is executed. In a flow a gap stays until the next `pass_on`, which
-- looks at the items then. A repeat of a call that is not noted does nothing: what it is about is not
-- pending under the holder any more.
local function note_call(k, r, holder, call)
  if r.protocol >= FLOW and is_gap(holder, call, tonumber(redis.call("HGET", k.holders, holder)) or 0) then
    return
  end
  redis.call("HSET", k.holders, holder, call)
end

-- Returns the reply to a call that must not be executed; nil when it may.
local function refusal(k, r, holder, call)
  local word
  if r.state == "done" or r.state == "cancelled" then
    word = r.state
  elseif not redis.call("ZSCORE", k.leases, holder) then
    word = "lost"
  elseif call <= (tonumber(redis.call("HGET", k.holders, holder)) or 0) then
    word = "late"
  end
  return word and { word, 0, list_of(r), 0 }
end
