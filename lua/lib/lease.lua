-- A part in `retry` stays pending in the group, under this consumer, which holds no lease.
local PARKED = "-"
-- Parts that are handed out, or looked at, in one go.
local MOST_HELD = 1000

local function number_of(id)
  return string.match(id, "^%d+")
end

-- Numbers of the parts pending under a holder, the first of them when they are very many.
local function held(parts, holder)
  local numbers = {}
  for i, entry in ipairs(redis.call("XPENDING", parts, "w", "-", "+", MOST_HELD, holder)) do
    numbers[i] = number_of(entry[1])
  end
  return numbers
end

-- Park parts until a moment; without one at the front, in input order: a part's number is
-- far below any time, so it is due at once and before everything that was put off.
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

-- End a lease: everything still pending under it goes to the front first, and nothing may be
-- left when its consumer goes, for that would be lost. Returns the numbers of the parts.
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

-- Why a call under a lease is not to be executed, as its reply; nil when it is.
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
