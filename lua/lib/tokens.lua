-- Tokens are invitations to claim. What is counted here as "out" is a belief: it may be
-- wrong in both directions, costs time then, and the audit sets it right.

-- Where the request's tokens belong: the end of the name of a list of its queue. Only workers that
-- have the handler take from it.
local function list_of(r)
  return string.format("%s:%02d", r.handler, r.level)
end

-- A rate may run ahead by this much, so that one claim can hand out several parts: a twentieth
-- of a second with the millisecond that the clock is cut to.
local RATE_AHEAD_MS = 49

-- The moment from which the request may start parts: a delayed start, a snooze, its rate.
local function blocked_until(r)
  if r.rate_ms > 0 then
    return math.max(r.hold_ms, math.ceil(r.rate_at_ms) - RATE_AHEAD_MS)
  end
  return r.hold_ms
end

-- Leases of the request, and whether nothing lies in its `retry`, which is so for most. Each is
-- asked once; whoever changes it after that says so in the request's table. Before the first claim
-- there is neither: two fields say so, lest one that somebody spoilt lifts the limit.
local function is_new(r)
  if r.new == nil then
    r.new = r.delivered == 0 and r.unit == ""
  end
  return r.new
end

local function leases_of(k, r)
  r.leases = r.leases or (is_new(r) and 0 or redis.call("ZCARD", k.leases))
  return r.leases
end

local function is_smooth(k, r)
  if r.smooth == nil then
    r.smooth = is_new(r) or redis.call("EXISTS", k.retry) == 0
  end
  return r.smooth
end

-- Parts that could start now, and the moment (0: none) at which more could.
local function startable(k, r, now)
  local ready, later = r.total - r.delivered, 0
  local first = is_smooth(k, r) and {} or redis.call("ZRANGE", k.retry, 0, 0, "WITHSCORES")
  if first[2] and tonumber(first[2]) <= now then
    ready = ready + redis.call("ZCOUNT", k.retry, "-inf", now)
  elseif first[2] then
    later = tonumber(first[2])
  end
  local blocked = blocked_until(r)
  if blocked > now and (ready > 0 or later > 0) then
    return 0, math.max(blocked, ready > 0 and 0 or later)
  end
  return ready, later
end

-- The moment to register for another look, or 0 when an earlier one is registered already.
local function look_again(r, now, later)
  if later > 0 and (r.due_ms <= now or later < r.due_ms) then
    put(r, "due_ms", later)
    return later
  end
  return 0
end

-- How many tokens to push, and when to look again.
local function invite(k, r, now)
  if not is_live(r) or r.paused == 1 then
    return 0, 0
  end
  local ready, later = startable(k, r, now)
  local free = r.limit - leases_of(k, r)
  local mint = math.max(0, math.min(free, ready, MOST_OUT) - r.out)
  if mint > 0 then
    put(r, "out", r.out + mint)
  end
  return mint, look_again(r, now, later)
end
